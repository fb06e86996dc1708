"""Read the files of ``sql/`` with PostgreSQL's own parser: the objects that each file creates and names."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pglast.parser import parse_sql_json, scan

NAME = re.compile(r'\b([a-z_]+)\."?([a-z_][\w$]*)')
BEGINS = (
    "select|insert|update|delete|with|create|alter|drop|grant|revoke|perform|call|lock|"
    "from|join|cross|left|where|and|or|not|exists|when|case|coalesce|array"
)
# A literal counts as code if its first word is an SQL command, or if it is just a name. Other literals are sentences for
# people.
CODE = re.compile(
    rf"\$|'\W*({BEGINS})\b|'[a-z_]+\.[\w$%]+(\([^']*\))?'$|'\W*[a-z_]+\.[\w$]+\(.*\)\W*'$", re.DOTALL
)
BEFORE_STATEMENT = re.compile(r"(?:\s|--.*\n)*")
COMMENTS = ("SQL_COMMENT", "C_COMMENT")
RETURNED = ("FUNC_PARAM_OUT", "FUNC_PARAM_TABLE")
LONG = 150
"""Bodies of functions that are shorter than this may be equal."""


@dataclass(frozen=True)
class Object:
    """The object that a statement creates or changes. ``takes`` are the types of a function's arguments; None means all
    functions with the name."""

    kind: str
    name: str
    takes: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + ("" if self.takes is None else f"({', '.join(self.takes)})")


@dataclass(frozen=True)
class SqlFile:
    """``made`` has the body of each function. ``named`` has the objects that the file names with their schemas, each with
    its first line."""

    path: str
    made: dict[Object, str]
    commented: frozenset[Object]
    named: dict[str, int]


@dataclass(frozen=True)
class Token:
    kind: str
    start: int
    text: str


def read(path: str, text: str) -> SqlFile:
    """Return the objects that the statements of a file create and name. Comments are for people, and name no objects."""
    made: dict[Object, str] = {}
    commented = set()
    named: dict[str, int] = {}
    for start, code, kind, statement in _statements(text):
        if kind == "CommentStmt":
            commented.add(_commented(statement))
            continue
        if thing := _made(kind, statement):
            if kind == "CreateFunctionStmt" and _comment_above(text, start):
                commented.add(thing)
            made[thing] = _body(statement) if kind == "CreateFunctionStmt" else ""
        for name, at in _named(code, bodies=kind in ("CreateFunctionStmt", "DoStmt")):
            named.setdefault(name, text.count("\n", 0, start + at) + 1)
    return SqlFile(path, made, frozenset(commented), named)


def looking_forward(files: Sequence[SqlFile]) -> list[str]:
    """Return names of objects that only a later file creates. The files are in the order in which they are loaded."""
    first: dict[str, int] = {}
    for number, file in enumerate(files):
        for thing in file.made:
            first.setdefault(thing.name, number)
    return [
        f"{file.path}:{line} names {name} of {files[first[name]].path}"
        for number, file in enumerate(files)
        for name, line in file.named.items()
        if first.get(name, number) > number
    ]


def without_comment(files: Sequence[SqlFile]) -> list[str]:
    """Return objects without a `comment on`, and functions without a comment above them."""
    told = {thing for file in files for thing in file.commented}
    return [
        f"{file.path}: {thing}"
        for file in files
        for thing in file.made
        if thing.kind not in ("sequence", "partition") and not told & {thing, Object(thing.kind, thing.name)}
    ]


def written_twice(files: Sequence[SqlFile]) -> list[str]:
    """Return functions whose body is equal to that of another function."""
    alike = defaultdict(list)
    for file in files:
        for thing, body in file.made.items():
            alike[" ".join(body.split())].append(f"{file.path}: {thing}")
    return [" and ".join(things) for words, things in alike.items() if len(words) > LONG and len(things) > 1]


def _comment_above(text: str, start: int) -> bool:
    """Whether the line before a statement is a comment. ``start`` may lie before such lines."""
    head = BEFORE_STATEMENT.match(text, start)
    lines = text[: head.end() if head else start].splitlines()
    return bool(lines) and lines[-1].startswith("--")


def _statements(text: str) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    """Yield each statement: its position, its text, and its kind and content as the parser reports them.

    The parser counts bytes.
    """
    raw = text.encode()
    for one in json.loads(parse_sql_json(text))["stmts"]:
        start = one.get("stmt_location", 0)
        [(kind, statement)] = one["stmt"].items()
        code = raw[start : start + one["stmt_len"]] if "stmt_len" in one else raw[start:]
        yield len(raw[:start].decode()), code.decode(), kind, statement


def _made(kind: str, statement: dict[str, Any]) -> Object | None:
    match kind:
        case "CreateFunctionStmt":
            given = [one["FunctionParameter"] for one in statement.get("parameters", ())]
            takes = tuple(_type(one["argType"]) for one in given if one["mode"] not in RETURNED)
            return Object(
                "procedure" if "is_procedure" in statement else "function",
                _dotted(statement["funcname"]),
                takes,
            )
        case "CreateStmt":
            # A partition that is created together with its table shares the comment of the table.
            return Object(
                "partition" if "partbound" in statement else "table", _relation(statement["relation"])
            )
        case "ViewStmt":
            return Object("view", _relation(statement["view"]))
        case "CompositeTypeStmt":
            return Object("type", _relation(statement["typevar"]))
        case "CreateEnumStmt":
            return Object("type", _dotted(statement["typeName"]))
        case "CreateDomainStmt":
            return Object("domain", _dotted(statement["domainname"]))
        case "CreateSeqStmt":
            return Object("sequence", _relation(statement["sequence"]))
    return None


def _commented(statement: dict[str, Any]) -> Object:
    kind = statement["objtype"].removeprefix("OBJECT_").lower()
    [(shape, about)] = statement["object"].items()
    match shape:
        case "ObjectWithArgs":
            types = [one["TypeName"] for one in about.get("objargs", ())]
            return Object(
                kind,
                _dotted(about["objname"]),
                None if "args_unspecified" in about else tuple(map(_type, types)),
            )
        case "TypeName":
            return Object(kind, _dotted(about["names"]))
        case "List":
            return Object(kind, _dotted(about["items"]))
    return Object(kind, about["sval"])


def _body(statement: dict[str, Any]) -> str:
    options = [(one["DefElem"]["defname"], one["DefElem"]["arg"]) for one in statement.get("options", ())]
    return "".join(arg["List"]["items"][0]["String"]["sval"] for name, arg in options if name == "as")


def _relation(relation: dict[str, str]) -> str:
    return f"{relation['schemaname']}.{relation['relname']}"


def _dotted(names: list[Any]) -> str:
    return ".".join(name["String"]["sval"] for name in names)


def _type(name: dict[str, Any]) -> str:
    """Return the last name of a type: the parser reports ``pg_catalog.int4`` for ``integer``."""
    return _dotted(name["names"][-1:]) + "[]" * len(name.get("arrayBounds", ()))


def _named(code: str, *, bodies: bool) -> Iterator[tuple[str, int]]:
    """Yield names with their schemas, and their positions.

    With ``bodies``, names in dollar-quoted texts are included.
    """
    tokens = _tokens(code)
    yield from _pairs(tokens)
    for token in tokens:
        if bodies and token.kind == "SCONST" and token.text.startswith("$"):
            quote = token.text.index("$", 1) + 1
            for name, at in _named_in_body(token.text[quote:-quote]):
                yield name, token.start + quote + at


def _named_in_body(body: str) -> Iterator[tuple[str, int]]:
    """Yield names in a body and in its literals, which may be executed. Literals in messages of errors are left out."""
    tokens = _tokens(body)
    yield from _pairs(tokens)
    raising, brackets = False, 0
    for before, token in zip([tokens[0], *tokens], tokens, strict=False):
        raising = token.text == "raise" or (raising and token.text != ";")
        if token.text == "(" and (brackets or before.text == "refuse"):
            brackets += 1
        elif token.text == ")" and brackets:
            brackets -= 1
        if token.kind == "SCONST" and not raising and not brackets and CODE.match(token.text):
            for found in NAME.finditer(token.text):
                yield f"{found[1]}.{found[2]}", token.start + found.start()


def _tokens(code: str) -> list[Token]:
    return [
        Token(token.name, token.start, code[token.start : token.end + 1])
        for token in scan(code)
        if token.name not in COMMENTS
    ]


def _pairs(tokens: Sequence[Token]) -> Iterator[tuple[str, int]]:
    for schema, dot, name in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if dot.text == ".":
            yield f"{schema.text}.{name.text}".replace('"', ""), schema.start
