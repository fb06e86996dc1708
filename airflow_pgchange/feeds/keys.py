"""Keys of rows: how PostgreSQL sends them, how Python holds them, and how people write them.

A key of one integer column travels as a bigint. Any other key travels as text: one column as its text, several columns as
the text of the array of their texts, such as ``{7f,12}``. People leave the braces out: ``7f,12``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from airflow_pgchange.errors import InvalidArgument

Key: TypeAlias = int | str | tuple[int | str, ...]
"""The key of a row: an int for one integer column, a str for one other column, a tuple for several columns. The
elements of a tuple are ints for integer columns."""
BIGINT = ("bigint",)
"""The types of the key of one integer column."""
_SPACE = " \t\n\r\v\f"
_ELEMENT = re.compile(r'[ \t\n\r\v\f]*(?:"((?:[^"\\]|\\.)*)"[ \t\n\r\v\f]*|([^",{}\\]+))(,|\Z)', re.DOTALL)
_PLAIN = re.compile(r'[^"\\{}, \t\n\r\v\f]+')
_INTEGER = re.compile(r"[+-]?[0-9]+")


def value(sent: int | str | Sequence[int | str], types: Sequence[str]) -> Key:
    """Return the key that PostgreSQL sent: a bigint, a text, or an array of the texts of several columns.

    ``types`` are the types of the key's columns. Raises InvalidArgument if the key does not have as many columns.
    """
    if isinstance(sent, int):
        return sent
    if len(types) == 1:
        return _element(sent if isinstance(sent, str) else str(sent[0]), types[0])
    texts = _elements(sent) if isinstance(sent, str) else sent
    if len(texts) != len(types):
        raise InvalidArgument(
            f"{shown(tuple(texts))!r} is no key of the types {', '.join(types)}: write {len(types)} values with commas "
            "between them"
        )
    return tuple(_element(str(part), kind) for part, kind in zip(texts, types, strict=True))


def text(key: Key) -> str:
    """Return a key as its text in PostgreSQL."""
    if isinstance(key, tuple):
        return "{" + ",".join(_quoted(str(part)) for part in key) + "}"
    return str(key)


def shown(key: Key) -> str:
    """Return a key as people write it. ``written`` reads it back."""
    return text(key)[1:-1] if isinstance(key, tuple) else str(key)


def written(key: str, types: Sequence[str]) -> Key:
    """Return the key that a person wrote: the values of several columns with commas between them.

    A value with a comma, a quote or a space at its end stands in double quotes. Raises InvalidArgument for another number
    of values, and for a value that is not an integer in an integer column.
    """
    return value(key, types)


def _element(part: str, kind: str) -> int | str:
    if kind != "bigint":
        return part
    if not _INTEGER.fullmatch(part):
        raise InvalidArgument(f"{part!r} is no value of a key of type bigint: write a whole number")
    return int(part)


def _elements(key: str) -> list[str]:
    body = key.strip(_SPACE)
    if body.startswith("{") and body.endswith("}"):
        body = body[1:-1]
    parts: list[str] = []
    at = 0
    while match := _ELEMENT.match(body, at):
        quoted, plain, end = match.groups()
        parts.append(
            plain.strip(_SPACE) if quoted is None else re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
        )
        at = match.end()
        if not end:
            return parts
    raise InvalidArgument(
        f"{key!r} is no key: write the values with commas between them. Put an empty value, or a value with a comma "
        f"or a brace, in double quotes"
    )


def _quoted(part: str) -> str:
    if _PLAIN.fullmatch(part) and part.upper() != "NULL":
        return part
    return '"' + re.sub(r'(["\\])', r"\\\1", part) + '"'
