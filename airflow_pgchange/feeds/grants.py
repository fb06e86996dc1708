"""The grants that a role lacks for a statement. The declarations of ``pgchange.add_role()`` in ``sql/`` tell them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

LITERAL = r"'(?:[^']|'')*'(?:\s*'(?:[^']|'')*')*"
ROLE = re.compile(r"select pgchange\.add_role\(\s*'(\w+)', '(\w+)'(.*?)\);\n", re.DOTALL)
OFFERED = re.compile(r"add_offer\(\s*'[^']+', '(\w+)',\s.*?,\s+(null|'\w+'), \$\$", re.DOTALL)
"""A function that ``pgchange.offer()`` gives each feed, and the role that may execute it."""
NAMED = re.compile(r'(?:\b(insert into|copy|update|delete from)\s+)?"?\b(\w+)"?\."?(\w+)', re.IGNORECASE)
"""A name with its schema in a statement, and the command in front of it."""
VERBS = {"insert into": "insert", "copy": "insert", "update": "update", "delete from": "delete"}
DENIED = re.compile(r"^permission denied for ((?:materialized |foreign )?\w+) (.+)")
RIGHTS = {
    "function": "execute on function",
    "procedure": "execute on procedure",
    "sequence": "usage on sequence",
    "database": "create on database",
}
"""The right that each kind of object needs, if it is neither a table nor a schema."""
STANDARD = "consumer"
"""The role of a schema that is offered if the statement names nothing that any role of the schema may use."""


@dataclass(frozen=True)
class Role:
    """A role of one of our schemas.

    ``objects`` are its rights on tables and the like, in the form of GRANT. ``functions`` are the functions that it may
    execute; ``*`` stands for all of the schema.
    """

    schema: str
    name: str
    told: str
    includes: tuple[str, ...]
    objects: tuple[str, ...]
    functions: tuple[str, ...]

    @property
    def own_rights(self) -> Iterator[str]:
        """``verb schema.table`` for each of its own rights on tables, and ``schema.name`` for those on functions and
        sequences."""
        # A schema may write an offered function itself, and give it to another role.
        written = {name for each in declared() if each.schema == self.schema for name in each.functions}
        offered = set(_offered().get(self.name, ())) - written
        for name in (*self.functions, *offered):
            yield f"{self.schema}.{name.partition('(')[0]}"
        for each in self.objects:
            verbs, _, names = each.partition(" on ")
            for name in re.findall(r"\w+\.\w+", names):
                if names.startswith(("function ", "sequence ")):
                    yield name
                yield from (f"{verb} {name}" for verb in re.findall(r"\w+", re.sub(r"\(.*?\)", "", verbs)))

    def statement(self, role: str) -> str:
        """Return the statement that grants these rights."""
        return f"select {self.schema}.grant_{self.name}('{identifier(role).replace(chr(39), chr(39) * 2)}')"


def sql_folder() -> Path:
    """Return the folder of the SQL files: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "sql"
    return inside if inside.is_dir() else package.parent / "sql"


@cache
def declared() -> tuple[Role, ...]:
    """Return the roles of all our schemas, as their files declare them."""
    files = sorted(sql_folder().glob("*/*roles.sql"))
    return tuple(_role(*found) for path in files for found in ROLE.findall(path.read_text()))


def identifier(name: str) -> str:
    """Return the name of a role as SQL."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_$]*", name) else '"{}"'.format(name.replace('"', '""'))


def advice(message: str, statement: str, role: str) -> str | None:
    """Return which grants ``role`` needs, and who has to run them, for an error of PostgreSQL about a missing right.

    ``statement``: the statement that failed, with those of our functions in which it failed. Returns None for errors of
    other kinds.
    """
    denied = DENIED.search(message)
    if denied is None:
        return None
    kind, name = denied.groups()
    if kind == "function" and name.startswith("pg_"):
        return (
            "PostgreSQL lets every role call it, but that was revoked on this server: let a superuser run, for this role "
            f"and for the owner of our schemas: grant execute on function pg_catalog.{name} to {identifier(role)}"
        )
    roles = _roles_for(statement, kind, name)
    if roles:
        schemas = " and ".join(dict.fromkeys(each.schema for each in roles))
        statements = "; ".join(each.statement(role) for each in roles)
        return f"let the owner of schema {schemas} run: {statements}{_including(roles)}"
    each = [f"grant {right} to {identifier(role)}" for right in _plain_rights(kind, name, statement)]
    return f"let its owner run: {'; '.join(each)}"


def _roles_for(statement: str, kind: str, name: str) -> list[Role]:
    """Return the smallest roles that may use all objects of ours that a statement names, or the smallest role that may
    use the denied object. Returns no role if no role of ours may, as for a table of the user."""
    requested = [right for right in _needed(statement) if any(_may(each, right) for each in declared())]
    if kind == "schema" and not any(_schema(right) == name for right in requested):
        return [each for each in declared() if (each.schema, each.name) == (name, STANDARD)]
    roles: list[Role] = []
    needed = requested
    while needed:
        able = [each for each in declared() if _may(each, needed[0])]
        best = min(able, key=lambda each: (-sum(_may(each, right) for right in needed), len(_rights(each))))
        roles.append(best)
        needed = [right for right in needed if not _may(best, right)]
    denied = name.partition("(")[0]
    if kind == "schema" or denied in map(_bare, chain(requested, *map(_rights, roles))):
        return roles
    schemas = {each.schema for each in roles}
    able = [each for each in declared() if each.schema in schemas and denied in map(_bare, _rights(each))]
    return sorted(able, key=lambda each: len(_rights(each)))[:1]


def _including(roles: list[Role]) -> str:
    """Return a line with the roles of feeds that include a role of all feeds. They also show what a feed has."""
    if {each.schema for each in roles} != {"pgchange"}:
        return ""
    able: dict[str, Role] = {}
    for each in sorted(declared(), key=lambda each: (each.name != STANDARD, len(_rights(each)))):
        if each.schema != "pgchange" and all(_rights(role) <= _rights(each) for role in roles):
            able.setdefault(each.schema, each)
    listed = ", ".join(f"{each.schema}.grant_{each.name}" for each in declared() if each in able.values())
    return f"\nThese grants for a feed include it: {listed}"


def _needed(statement: str) -> list[str]:
    """Return the rights that the names in a statement may need, on a function or on a table."""
    found = NAMED.findall(statement)
    each = [
        (f"{schema}.{name}", f"{VERBS.get(verb.lower(), 'select')} {schema}.{name}")
        for verb, schema, name in found
    ]
    return list(dict.fromkeys(right for rights in each for right in rights))


def _bare(right: str) -> str:
    return right.rpartition(".")[2]


def _schema(right: str) -> str:
    return right.rsplit(" ", maxsplit=1)[-1].partition(".")[0]


def _plain_rights(kind: str, name: str, statement: str) -> Iterator[str]:
    """Yield the rights on an object, in the form of GRANT, if no role of ours has them."""
    found = NAMED.findall(statement)
    full = {each: f"{schema}.{each}" for _, schema, each in found}.get(name, name)
    if kind == "schema":
        called = re.findall(rf'"?\b{re.escape(name)}"?\."?(\w+)"?\(', statement)
        yield from (
            f"usage on schema {identifier(name)}",
            *(f"execute on function {name}.{each}" for each in called),
        )
        return
    if kind in RIGHTS:
        yield f"{RIGHTS[kind]} {identifier(name) if kind == 'database' else full}"
        return
    verbs = [VERBS[verb.lower()] for verb, _, each in found if verb and each == name]
    # The functions of a tube read its pods and delete them.
    standard = "select, delete" if any(schema == "tube" for _, schema, _ in found) else "select"
    yield f"{', '.join(verbs) or standard} on {full}"


def _may(role: Role, right: str) -> bool:
    rights = _rights(role)
    return right in rights or (" " not in right and f"{_schema(right)}.*" in rights)


@cache
def _rights(role: Role) -> frozenset[str]:
    """Return the rights of a role and of the roles that it includes."""
    included = (each for each in declared() if f"{each.schema}.{each.name}" in role.includes)
    return frozenset(role.own_rights).union(*map(_rights, included))


@cache
def _offered() -> dict[str, list[str]]:
    """Return the functions that ``pgchange.offer()`` gives every feed, by the role that may execute them."""
    text = "".join(path.read_text() for path in sorted((sql_folder() / "core").glob("*.sql")))
    found = OFFERED.findall(text)
    return {
        role: [name for name, callers in found if callers == f"'{role}'"] for role in ("consumer", "admin")
    }


def _role(schema: str, name: str, declaration: str) -> Role:
    told = re.search(rf"told =>\s*({LITERAL})", declaration)
    includes = re.search(r"includes => '([^']*)'", declaration)
    objects = re.search(r"objects => array\[(.*?)\]", declaration, re.DOTALL)
    functions = re.search(r"functions => (?:'([^']*)'|\$\$(.*?)\$\$)", declaration, re.DOTALL)
    return Role(
        schema,
        name,
        told=_text(told[1]) if told else "",
        includes=tuple(includes[1].split()) if includes else (),
        objects=tuple(_text(each) for each in re.findall(LITERAL, objects[1])) if objects else (),
        functions=tuple(re.findall(r"[^\s(]+(?:\([^)]*\))?", functions[1] or functions[2]))
        if functions
        else (),
    )


def _text(literal: str) -> str:
    return re.sub(r"'\s+'", "", literal)[1:-1].replace("''", "'")
