"""The SQL functions that users may call, and the rights that each ``grant_`` function gives."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from airflow_pgchange import errors
from airflow_pgchange.admin import schema
from airflow_pgchange.feeds.error_translation import BY_SQLSTATE
from demo.postgres import Cluster, system_binaries
from tests.readme import ROOT

TITLES = {
    "pgchange": "All feeds",
    "revision": "Commit queue: tracking",
    "pubsub": "Commit queue: consumers",
    "tube": "Tubes",
    "pgmb": "Event log",
    "mbus": "Message queues and sagas",
    "topology": "Topology",
}
FUNCTIONS = """
select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid), p.prokind = 'p',
       obj_description(p.oid, 'pg_proc')
from pg_proc as p
where p.pronamespace = %s::regnamespace and p.prorettype <> 'trigger'::regtype
  and obj_description(p.oid, 'pg_proc') not like 'Internal to schema%%'
  and (p.proname like 'grant\\_%%' or exists (
      select from aclexplode(p.proacl) as a where a.grantee <> p.proowner and a.privilege_type = 'EXECUTE'))
order by p.proname, p.pronargs
"""
WIDTH = 80
"""The number of characters of a line that the site shows without scrolling."""
EVERYBODY = "reader_of_the_docs"
ROLE = re.compile(r"select pgchange\.add_role\(\s*'(\w+)', '(\w+)'(.*?)\);\n", re.DOTALL)
LITERAL = r"'(?:[^']|'')*'(?:\s*'(?:[^']|'')*')*"


def functions() -> str:
    """Return a section for each schema, with its functions that some role may be granted, as in a new database."""
    cluster = Cluster.create(system_binaries())
    try:
        with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
            schema.install(connection)
            connection.execute(f"create role {EVERYBODY}")
            for name, role in _roles(connection):
                connection.execute(f"select {name}.{role}('{EVERYBODY}')")
            return "\n".join(line for name in TITLES for line in _section(connection, name))
    finally:
        cluster.remove()


def codes() -> str:
    """Return a row for each SQLSTATE that our functions raise, with the corresponding public exception in Python."""
    rows = []
    for code, error in BY_SQLSTATE.items():
        if code.startswith("PC"):
            name = next(each.__name__ for each in error.__mro__ if each.__name__ in errors.__all__)
            link = f"[{name}](python/errors.md#{errors.__name__}.{name})"
            rows.append(f"| `{code}` | {link} | {_first_line(error)} |")
    return "\n".join(["| code | error in Python | meaning |", "|---|---|---|", *rows])


def _first_line(error: type[Exception]) -> str:
    return (inspect.getdoc(error) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _roles(connection: psycopg.Connection[Any]) -> Sequence[tuple[str, str]]:
    return connection.execute(
        "select pronamespace::regnamespace::text, proname from pg_proc where pronamespace::regnamespace::text = any (%s) "
        "and proname like 'grant\\_%%'",
        [list(TITLES)],
    ).fetchall()


def _section(connection: psycopg.Connection[Any], name: str) -> Iterator[str]:
    yield f"## {TITLES[name]}: `{name}`\n"
    for function, arguments, result, is_procedure, comment in connection.execute(FUNCTIONS, [name]):
        call = "call " if is_procedure else ""
        returned = f" returns {result}" if result else ""
        text = f"{call}{name}.{function}({arguments}){returned}"
        if len(text) > WIDTH:
            inside = arguments.replace(", ", ",\n    ")
            text = f"{call}{name}.{function}(\n    {inside}\n){returned}"
        yield f"### {name}.{function}\n\n```sql\n{text}\n```\n\n{comment}\n"


def grants() -> str:
    """Return the rights that each ``grant_`` function grants, as its schema declares them."""
    lines: list[str] = []
    for path in sorted((ROOT / "sql").glob("*/*roles.sql")):
        for name, role, declared in ROLE.findall(path.read_text()):
            lines += _grant(name, role, declared)
    return "\n".join(lines)


def _grant(name: str, role: str, declared: str) -> Iterator[str]:
    told = re.search(rf"told =>\s*({LITERAL})", declared)
    includes = re.search(r"includes => '([^']*)'", declared)
    objects = re.search(r"objects => array\[(.*?)\]", declared, re.DOTALL)
    called = re.search(r"functions => (?:'([^']*)'|\$\$(.*?)\$\$)", declared, re.DOTALL)
    assert told, (name, role)
    yield f"### {name}.grant_{role}\n\n{_text(told[1])}\n"
    if includes:
        yield f"- the rights of {', '.join(f'`{each}`' for each in includes[1].split())}"
    yield f"- `usage` on schema `{name}`"
    for each in re.findall(LITERAL, objects[1]) if objects else ():
        yield f"- `{_text(each)}`"
    if called:
        names = re.findall(r"[^\s(]+(?:\([^)]*\))?", called[1] or called[2])
        listed = "all functions of the schema" if names == ["*"] else ", ".join(f"`{each}`" for each in names)
        yield f"- `execute` on {listed}"
    yield ""


def _text(literal: str) -> str:
    return re.sub(r"'\s+'", "", literal)[1:-1].replace("''", "'")
