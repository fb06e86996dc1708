"""SQL files as parts: a part for each statement, named after the object that it creates or changes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.suite.choosing.parts import Part, sql_named

# Texts in which a semicolon does not end a statement, and the semicolon that does.
PIECE = re.compile(r"--[^\n]*|'(?:[^']|'')*'|\"[^\"]*\"|(\$\w*\$).*?\1|;", re.DOTALL)
NAME = r'(\w+)\."?([\w$]+)'
KINDS = "function|procedure|table|view|type|domain|sequence|aggregate"
MADE = re.compile(
    rf"create\s+(?:or\s+replace\s+)?(?:unlogged\s+)?(?:{KINDS})\s+(?:if\s+not\s+exists\s+)?{NAME}"
)
ABOUT = re.compile(
    rf"(?:alter\s+(?:{KINDS})|comment\s+on\s+(?:{KINDS}|column)"
    r"|create\s+(?:unique\s+)?index\b[^(]*?\bon|create\s+policy\s+\S+\s+on"
    rf"|create\s+(?:constraint\s+)?trigger\s.*?\son)\s+{NAME}",
    re.DOTALL,
)
HOOK = re.compile(r"%(?:\d+\$)?I\.(\w+)")
"""A call of a function with this name in a schema that is only known at run time.

The core calls the hooks of feeds in this way.
"""
ROLE = re.compile(
    r"select pgchange\.add_role\(\s*'(\w+)', '(\w+)'.*?(?:functions => (?:\$\$|')(.*?)(?:\$\$|')\s*)?\);\Z",
    re.DOTALL,
)
"""The declaration of a role. It creates the function that grants rights on the functions of its list."""
WORD = re.compile(r"'([a-z]+(?:_[a-z]+)*)[_$]?'")
LEAD = re.compile(r"(?:\s|--[^\n]*\n)*")


def sql_parts(path: str, text: str) -> list[Part]:
    """Return a part for each statement of a file.

    A statement that creates nothing belongs to all objects that it names, as a grant belongs to its functions.
    """
    return [_part(path, first, statement) for first, statement in _statements(text)]


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each statement with the line on which it begins, comments before it included."""
    began = 0
    for piece in PIECE.finditer(text):
        if piece[0] == ";":
            statement = text[began : piece.end()].lstrip()
            yield text.count("\n", 0, piece.end() - len(statement)) + 1, statement
            began = piece.end()


def _part(path: str, first: int, statement: str) -> Part:
    last = first + statement.count("\n")
    code = statement[LEAD.match(statement).end() :]  # type: ignore[union-attr]
    names = frozenset(sql_named(code) | {f"hook:{name}" for name in HOOK.findall(code)})
    if role := ROLE.match(code):
        granted = {f"sql:{role[1]}.{name}" for name in re.findall(r"\w+", role[3] or "")}
        return Part(path, first, last, frozenset({f"sql:{role[1]}.grant_{role[2]}"}), names | granted)
    made = MADE.match(code)
    about = made or ABOUT.match(code)
    if not about:
        return Part(path, first, last, names)
    key, hook = f"sql:{about[1]}.{about[2]}", f"hook:{about[2]}"
    if code.startswith("comment"):
        return Part(path, first, last, frozenset({key}))
    # A function that composes names of others has their first words as literals.
    words = {f"made:{about[1]}.{word}" for word in WORD.findall(code)} if made else set()
    return Part(path, first, last, frozenset({key, hook, *words}), names - {key, hook})
