"""Edits of a file of SQL: of its statements, of its functions, and of the SQL in their strings."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from tests.suite.mutants.mutant import Edit
from tests.suite.mutants.plpgsql import plpgsql_edits
from tests.suite.mutants.query import parsed, walk, words
from tests.suite.mutants.query_edits import query_edits

_FUNCTION = ("CreateFunctionStmt", "DoStmt")
_QUOTE = re.compile(r"\$\w*\$")
_STATEMENT = re.compile(r"\s*(select|insert|update|delete|with|merge|create|lock)\b", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"%(\d*\$?)[-\d]*([IsL])")


def edits(text: str) -> Iterator[Edit]:
    """Yield edits of statements.

    Each statement still parses after its edit. A statement that does not parse now has no edits.
    """
    for start, end, statement in _statements(text):
        piece = text[start:end]
        for edit in _statement_edits(piece, statement):
            yield edit.moved(start)


def places(text: str) -> Callable[[int], str]:
    """Return a function that returns the name of the function, or of the other statement, at a position."""
    found = [(start, _name(statement)) for start, _, statement in _statements(text)]
    starts = [start for start, _ in found]
    return lambda position: found[bisect_right(starts, position) - 1][1] if found else ""


def _statements(text: str) -> Iterator[tuple[int, int, Any]]:
    query = parsed(text)
    for raw in query.tree.get("stmts", []) if query else []:
        start = raw.get("stmt_location", 0)
        yield start, start + raw.get("stmt_len", len(text) - start), raw["stmt"]


def _name(statement: Any) -> str:
    kind, node = next(iter(statement.items()))
    if kind == "CreateFunctionStmt":
        return ".".join(part["String"]["sval"] for part in node["funcname"])
    relation = node.get("relation") or node.get("view") or {}
    return str(relation.get("relname") or kind)


def _statement_edits(piece: str, statement: Any) -> Iterator[Edit]:
    kind, node = next(iter(statement.items()))
    if kind == "IndexStmt" and not node.get("unique"):
        # Such an index changes the cost of a query, but not its result.
        return
    yield from query_edits(piece)
    if kind not in _FUNCTION:
        return
    options = {
        option["DefElem"]["defname"]: option["DefElem"]
        for option in node.get("options", node.get("args", []))
    }
    language = options.get("language", {}).get("arg", {}).get("String", {}).get("sval", "plpgsql")
    if kind == "CreateFunctionStmt" and not node.get("is_procedure"):
        yield from _volatility(piece)
    body = _body(piece)
    if body is None:
        return
    start, end = body
    if language == "sql":
        yield from (edit.moved(start) for edit in query_edits(piece[start:end]))
        yield from (edit.moved(start) for edit in _dropped(piece[start:end]))
    elif language == "plpgsql":
        yield from plpgsql_edits(piece, _own_types(piece, start), start, end)
        yield from (edit.moved(start) for edit in _dynamic(piece[start:end]))


def _body(piece: str) -> tuple[int, int] | None:
    """Return the start and the end of a function's dollar-quoted body."""
    for start, end, word in words(piece):
        quote = _QUOTE.match(word)
        if quote:
            return start + quote.end(), end - quote.end()
    return None


def _own_types(piece: str, behind: int) -> list[int]:
    """Return the positions at which the head of a function names types outside of pg_catalog."""
    query = parsed(piece)
    return [
        node["location"]
        for name, node in (walk(query.tree) if query else ())
        if name in ("argType", "returnType", "typeName")
        and len(node.get("names", [])) > 1
        and node["names"][0]["String"]["sval"] != "pg_catalog"
        and node["location"] < behind
    ]


def _volatility(piece: str) -> Iterator[Edit]:
    """Declare a function as stable that is volatile."""
    tokens = [token for token in words(piece) if not _QUOTE.match(token[2])]
    stated = [token for token in tokens if token[2] in ("volatile", "stable", "immutable")]
    language = next((i for i, token in enumerate(tokens) if token[2] == "language"), None)
    if stated and stated[0][2] == "volatile":
        yield Edit(stated[0][0], stated[0][1], "stable", "stable")
    elif not stated and language is not None:
        behind = tokens[language + 1][1]
        yield Edit(behind, behind, " stable", "stable")


def _dropped(body: str) -> Iterator[Edit]:
    """Drop a statement of an SQL function, except the last statement."""
    for start, end, _ in list(_statements(body))[:-1]:
        yield Edit(start, end + 1, "", "drop statement")


def _dynamic(body: str) -> Iterator[Edit]:
    """Yield edits of statements in strings that are passed to ``format``."""
    for start, end, word in words(body):
        quote = _QUOTE.match(word) or re.match("'", word)
        if quote is None:
            continue
        inner = body[start + quote.end() : end - quote.end()]
        if not _STATEMENT.match(inner) or (quote[0] == "'" and ("''" in inner or "\\" in inner)):
            continue
        for edit in edits(_PLACEHOLDER.sub(_identifier, inner)):
            # Without this condition, text that an edit copies could lack its placeholders.
            if edit.kind != "drop coalesce" or "%" not in inner[edit.start : edit.end]:
                yield edit.moved(start + quote.end())


def _identifier(placeholder: re.Match[str]) -> str:
    return "x".ljust(len(placeholder[0]), "_")
