"""Edits of a PL/pgSQL function: of its statements, and of the SQL in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pglast.parser import ParseError, parse_plpgsql_json

from tests.suite.mutants.mutant import Edit
from tests.suite.mutants.query import walk, words
from tests.suite.mutants.query_edits import query_edits

_BEFORE = frozenset({";", "then", "else", "begin", "loop", ">>", "declare"})
_KEYWORDS = {
    "PLpgSQL_stmt_perform": ("perform",),
    "PLpgSQL_stmt_execsql": ("insert", "update", "delete", "merge", "lock", "with"),
    "PLpgSQL_stmt_dynexecute": ("execute",),
    "PLpgSQL_stmt_raise": ("raise",),
    "PLpgSQL_stmt_if": ("if",),
}
_ERROR = 21
_EXPRESSION, _ASSIGNMENT = 2, 3
"""Modes of the parser. Higher numbers are assignments, too: to a field of a record, or of a row in it."""
_TYPE = re.compile(r"[a-z_][\w$]*\.[a-z_][\w$]*(?:\.[\w$]+)?(?:%(?:row)?type)?(\[\])?", re.IGNORECASE)


@dataclass(frozen=True)
class Function:
    """A ``create function`` or a ``do``, the position of its body, and the parser's result."""

    text: str
    start: int
    end: int
    tree: Any

    @cached_property
    def body(self) -> list[tuple[int, int, str]]:
        """The start, the end and the lower-case text of each token of the body."""
        return [
            (start + self.start, end + self.start, word)
            for start, end, word in words(self.text[self.start : self.end])
        ]

    @cached_property
    def starts(self) -> list[int]:
        """The numbers of the tokens at which a statement may start."""
        return [i for i, _ in enumerate(self.body) if i == 0 or self.body[i - 1][2] in _BEFORE]

    def line(self, number: int) -> int:
        """Return the position at which a line of the body starts."""
        return self.start + sum(map(len, self.text[self.start : self.end].splitlines(True)[: number - 1]))


def plpgsql_edits(text: str, header: list[int], start: int, end: int) -> Iterator[Edit]:
    """Yield edits of the function whose body is from ``start`` to ``end``.

    ``header`` has the positions at which the head of the function names types of our own.
    """
    known = _with_known_types(text, header, start, end)
    tree = _parsed(known)
    if tree is None:
        return
    function = Function(text, start, end, tree)
    for edit in _statement_edits(function):
        if _parsed(edit.apply(known)) not in (None, tree):
            yield edit
    yield from _inner_edits(function)


def _parsed(text: str) -> Any:
    try:
        return json.loads(parse_plpgsql_json(text))
    except ParseError:
        return None


def _with_known_types(text: str, header: list[int], start: int, end: int) -> str:
    """Replace types of our own by types that the parser knows, without moving other text.

    The parser has no catalogue.
    """
    # The parser does not know which types are arrays, and a variadic argument must be an array. So drop the word
    # variadic.
    text = text[:start].replace("variadic ", "         ") + text[start:]
    places = [*header, *_declared(text, start, end)]
    for place in places:
        found = _TYPE.match(text, place)
        if found is not None:
            known = "text" if found[1] else "record"
            text = text[:place] + known.ljust(len(found[0])) + text[found.end() :]
    return text


def _declared(text: str, start: int, end: int) -> Iterator[int]:
    """Return the positions at which variables are declared with a type."""
    tokens = list(words(text[start:end]))
    declaring = False
    for i, (_, _, word) in enumerate(tokens[:-2]):
        if word in ("declare", "begin"):
            declaring = word == "declare"
        if declaring and word in ("declare", ";") and tokens[i + 1][2] != "begin":
            place = (
                tokens[i + 3][0]
                if tokens[i + 2][2] == "constant" and i + 3 < len(tokens)
                else tokens[i + 2][0]
            )
            yield start + place


def _statement_edits(function: Function) -> Iterator[Edit]:
    used: set[int] = set()
    for kind, node in walk(function.tree):
        first = _found(function, kind, node, used) if kind in _KEYWORDS else None
        if first is None:
            continue
        used.add(first)
        start, end = function.body[first][0], _end(function, first)
        text = function.text[start:end].lower()
        if kind == "PLpgSQL_stmt_raise":
            if node.get("elog_level") == _ERROR:
                yield Edit(start, end, "null;", "swallow error")
                # Only the parser knows in which of the two ways a function may end.
                yield Edit(start, end, "return;", "swallow error")
                yield Edit(start, end, "return null;", "swallow error")
        elif kind == "PLpgSQL_stmt_if":
            if _is_check(node):
                yield Edit(start, end, "null;", "skip check")
        elif not node.get("into"):
            locks = text.startswith("lock") or (text.startswith("perform") and "lock" in text.split("(")[0])
            yield Edit(start, end, "null;", "drop lock" if locks else "drop statement")


def _is_check(node: Any) -> bool:
    """Whether an ``if`` only raises an error."""
    body = node.get("then_body", [])
    alone = "elsif_list" not in node and "else_body" not in node
    return alone and len(body) == 1 and body[0].get("PLpgSQL_stmt_raise", {}).get("elog_level") == _ERROR


def _found(function: Function, kind: str, node: Any, used: set[int]) -> int | None:
    """Return the number of the first token of a statement. The parser reports only the line of the statement."""
    line = function.line(node["lineno"])
    behind = function.line(node["lineno"] + 1)
    for i in function.starts:
        if i not in used and line <= function.body[i][0] < behind and function.body[i][2] in _KEYWORDS[kind]:
            return i
    return None


def _end(function: Function, first: int) -> int:
    """Return the position at which a statement ends, including its semicolon."""
    depth = 0
    for i in range(first, len(function.body)):
        word = function.body[i][2]
        if word == "if" and i in function.starts:
            depth += 1
        elif word == "if" and function.body[i - 1][2] == "end":
            depth -= 1
        elif word == ";" and depth == 0:
            return function.body[i][1]
    return function.end


def _inner_edits(function: Function) -> Iterator[Edit]:
    """Yield edits of the SQL in a body, and of conditions that are a whole ``if``."""
    places = {start for start, _, _ in function.body}
    used: set[int] = set()
    for line, condition, node in _expressions(function.tree):
        prefix, wanted = _wanted(node)
        found = next(
            (
                m
                for m in wanted.finditer(function.text, function.line(line), function.end)
                if m.start() in places - used
            ),
            None,
        )
        if found is not None:
            used.add(found.start())
            start, end = found.span(1)
            edits = query_edits(_without_into(found[1], node), prefix)
            # A statement that only locks is dropped whole.
            yield from (edit.moved(start) for edit in edits if edit.text != "null::void")
            if condition:
                yield from _fixed(start, end, condition)


def _expressions(tree: Any, line: int = 1, condition: str = "") -> Iterator[tuple[int, str, Any]]:
    """Yield each expression with the line of its statement. ``condition`` is the statement whose condition it is, if
    any.

    The query of a ``for`` comes behind the statements of its loop, whose lines are higher.
    """
    if isinstance(tree, list):
        for node in tree:
            yield from _expressions(node, line)
    elif isinstance(tree, dict):
        line = tree.get("lineno", line)
        for kind, node in tree.items():
            if kind == "PLpgSQL_expr":
                yield line, condition, node
            elif kind in ("PLpgSQL_stmt_if", "PLpgSQL_if_elsif"):
                is_check = kind == "PLpgSQL_stmt_if" and _is_check(node)
                yield from _expressions(node["cond"], node["lineno"], "check" if is_check else "branch")
                yield from _expressions({k: v for k, v in node.items() if k != "cond"}, line)
            else:
                yield from _expressions(node, line)


def _fixed(start: int, end: int, condition: str) -> Iterator[Edit]:
    yield Edit(start, end, "true", "fixed condition")
    if condition == "branch":
        yield Edit(start, end, "false", "fixed condition")


def _wanted(node: Any) -> tuple[str, re.Pattern[str]]:
    """Return a prefix with which the expression parses, and a pattern that finds the expression in the source.

    The parser reports the text of an expression, but not its position. It has replaced ``perform`` by SELECT, and
    ``into`` with its targets by blanks.
    """
    query, mode = node["query"], node.get("parseMode", 0)
    if mode >= _ASSIGNMENT:
        target, operator, value = re.match(r"(.*?)(:?=)(.*)", query, re.DOTALL).groups()  # type: ignore[union-attr]
        return "select ", re.compile(f"{re.escape(target + operator)}({re.escape(value)})")
    if mode == 0 and query.startswith("SELECT "):
        return "select ", re.compile(f"perform({_loosely(query[6:])})", re.IGNORECASE)
    return ("select " if mode == _EXPRESSION else ""), re.compile(f"({_loosely(query)})")


def _loosely(query: str) -> str:
    """Return a pattern in which a run of blanks stands for any text of the same length."""
    parts = re.split(r"( {5,})", query)
    return "".join(f"[\\s\\S]{{{len(part)}}}" if part.isspace() else re.escape(part) for part in parts)


def _without_into(found: str, node: Any) -> str:
    """Return the query as the parser wrote it, without ``into``, if its length shows that nothing has moved."""
    query: str = node["query"]
    return query if len(query) == len(found) else found
