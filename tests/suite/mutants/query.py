"""A piece of SQL as PostgreSQL's own lexer and parser see it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pglast.parser import ParseError, parse_sql_json, scan

_OPENS = frozenset({"(", "[", "case"})
_CLOSES = frozenset({")", "]", "end"})
_PLACES = frozenset(
    {"location", "stmt_location", "stmt_len", "arg_location", "list_start", "list_end"}
    | {"rexpr_list_start", "rexpr_list_end"}
)
STOPS = frozenset(
    re.findall(
        r"\S+",
        ", ; and or where on having when then else select return group order limit offset union except "
        "intersect for returning window loop from join left right inner full cross natural using as with set "
        "values fetch rows range groups conflict do",
    )
)
"""Words that end a condition or a key of an order, before it or after it."""


@dataclass(frozen=True)
class Token:
    start: int
    end: int
    word: str
    level: int
    """The number of brackets around the token. ``case`` and ``end`` count as brackets."""


@dataclass(frozen=True)
class Query:
    """SQL that parses: statements, or an expression with a prefix that makes it a statement."""

    text: str
    tree: Any

    @cached_property
    def tokens(self) -> list[Token]:
        return list(_tokens(self.text))

    def at(self, location: int) -> int | None:
        """Return the number of the token that starts at a position."""
        return next((i for i, token in enumerate(self.tokens) if token.start == location), None)

    def nodes(self, name: str) -> Iterator[Any]:
        """Yield all nodes of a kind."""
        return (node for kind, node in walk(self.tree) if kind == name)

    def forward(self, first: int, stops: frozenset[str] = STOPS) -> int:
        """Return the number of the token after the piece that starts with token ``first``."""
        level = self.tokens[first].level if first < len(self.tokens) else 0
        for i in range(first, len(self.tokens)):
            if self._ends(i, level, stops):
                return i
        return len(self.tokens)

    def backward(self, last: int, stops: frozenset[str] = STOPS) -> int:
        """Return the number of the first token of the piece that ends with token ``last``."""
        level = self.tokens[last].level
        for i in range(last, -1, -1):
            if self._ends(i, level, stops):
                return i + 1
        return 0

    def closing(self, opening: int) -> int:
        """Return the number of the bracket that closes the opening bracket."""
        level = self.tokens[opening].level
        return next(i for i in range(opening + 1, len(self.tokens)) if self.tokens[i].level == level)

    def span(self, first: int, behind: int) -> tuple[int, int]:
        return self.tokens[first].start, self.tokens[behind - 1].end

    def _ends(self, i: int, level: int, stops: frozenset[str]) -> bool:
        token = self.tokens[i]
        if token.level != level:
            return token.level < level
        if token.word == "from" and i and self.tokens[i - 1].word == "distinct":
            return False
        if token.word in ("left", "right") and i + 1 < len(self.tokens) and self.tokens[i + 1].word == "(":
            return False
        return token.word in stops and not (token.word == "and" and self._bounds(i))

    def _bounds(self, i: int) -> bool:
        """Whether an ``and`` belongs to a ``between``."""
        level = self.tokens[i].level
        for token in reversed(self.tokens[:i]):
            if token.level < level or (token.level == level and token.word in STOPS):
                return False
            if token.level == level and token.word == "between":
                return True
        return False


def parsed(text: str) -> Query | None:
    """Parse a text as SQL. Return None if it does not parse."""
    try:
        return Query(text, json.loads(parse_sql_json(text)))
    except ParseError:
        return None


def walk(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield each node and its kind, outer nodes before inner nodes."""
    if isinstance(tree, dict):
        for name, node in tree.items():
            yield name, node
            yield from walk(node)
    elif isinstance(tree, list):
        for node in tree:
            yield from walk(node)


def bare(tree: Any) -> Any:
    """Return a tree without positions. Two texts with the same meaning have equal trees."""
    if isinstance(tree, dict):
        return {name: bare(node) for name, node in tree.items() if name not in _PLACES}
    return [bare(node) for node in tree] if isinstance(tree, list) else tree


def words(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the start, the end and the lower-case text of each token except comments."""
    for token in scan(text):
        if token.name not in ("SQL_COMMENT", "C_COMMENT"):
            yield token.start, token.end + 1, text[token.start : token.end + 1].lower()


def _tokens(text: str) -> Iterator[Token]:
    level = 0
    for start, end, word in words(text):
        if word in _CLOSES:
            level = max(level - 1, 0)
        yield Token(start, end, word, level)
        if word in _OPENS:
            level += 1
