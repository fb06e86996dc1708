"""Compare the type of a column with the type of its copy, by the texts that PostgreSQL's format_type returns."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TYPE = re.compile(
    r"(?P<name>[a-z][a-z ]*?)(?:\((?P<size>\d+)(?:,(?P<scale>-?\d+))?\))?"
    r"(?P<rest> with(?:out)? time zone)?(?P<array>(?:\[\])?)"
)
VARCHAR = "character varying"
CHARS = frozenset({"character", "bpchar"})
STRINGS = CHARS | {VARCHAR, "text"}
WIDTHS = ("smallint", "integer", "bigint")


@dataclass(frozen=True)
class TypeChange:
    """The type that a column of a copy needs to hold every value of its source's column.

    ``in_place``: PostgreSQL changes to this type without rewriting the table and without reading it.
    """

    type: str
    in_place: bool


@dataclass(frozen=True)
class _Type:
    """A type in parts. ``size`` is None if the type has no limit. ``scale`` is None except for numeric."""

    name: str
    size: int | None
    scale: int | None
    array: str

    @property
    def digits(self) -> int:
        """The digits before the decimal point."""
        return (self.size or 0) - (self.scale or 0)


def type_change(source: str, copy: str) -> TypeChange | None:
    """Return the change that the copy's column needs; None if it holds every value of the source's column.

    It also returns None for types of different families, such as an enum and text. The merge then checks whether the
    values fit.
    """
    source_type, copy_type = _parsed(source), _parsed(copy)
    if source_type is None or copy_type is None or source_type.array != copy_type.array:
        return None
    if source_type.name in WIDTHS and copy_type.name in WIDTHS:
        wider = WIDTHS.index(source_type.name) > WIDTHS.index(copy_type.name)
        return TypeChange(source, in_place=False) if wider else None
    is_string = source_type.name in STRINGS and copy_type.name in STRINGS
    if copy_type.size is None or not (is_string or source_type.name == copy_type.name):
        return None
    return (
        _of_numeric(source_type, copy_type)
        if source_type.name == "numeric"
        else _of_length(source, source_type, copy_type)
    )


def _of_length(source: str, source_type: _Type, copy_type: _Type) -> TypeChange | None:
    if source_type.size is not None and copy_type.size is not None and source_type.size <= copy_type.size:
        return None
    if copy_type.name != VARCHAR:
        return TypeChange(source, in_place=False)
    if source_type.name in CHARS:
        # Use varchar instead of char, because PostgreSQL would convert each value to char.
        source = VARCHAR + ("" if source_type.size is None else f"({source_type.size})") + copy_type.array
    return TypeChange(source, in_place=not copy_type.array)


def _of_numeric(source_type: _Type, copy_type: _Type) -> TypeChange | None:
    if source_type.size is None:
        return TypeChange(f"numeric{copy_type.array}", in_place=not copy_type.array)
    source_scale, copy_scale = source_type.scale or 0, copy_type.scale or 0
    digits, scale = max(source_type.digits, copy_type.digits), max(source_scale, copy_scale)
    if (digits, scale) == (copy_type.digits, copy_scale):
        return None
    # Numbers are stored with their decimal places, so a change of scale rewrites every row.
    in_place = scale == copy_scale and not copy_type.array
    return TypeChange(f"numeric({digits + scale},{scale}){copy_type.array}", in_place)


def _parsed(type_: str) -> _Type | None:
    match = _TYPE.fullmatch(type_)
    if match is None:
        return None
    size, scale = (None if match[part] is None else int(match[part]) for part in ("size", "scale"))
    return _Type(match["name"] + (match["rest"] or ""), size, scale, match["array"])
