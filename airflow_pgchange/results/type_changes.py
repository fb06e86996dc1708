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
    wanted, held = _parsed(source), _parsed(copy)
    if wanted is None or held is None or wanted.array != held.array:
        return None
    if wanted.name in WIDTHS and held.name in WIDTHS:
        wider = WIDTHS.index(wanted.name) > WIDTHS.index(held.name)
        return TypeChange(source, in_place=False) if wider else None
    is_string = wanted.name in STRINGS and held.name in STRINGS
    if held.size is None or not (is_string or wanted.name == held.name):
        return None
    return _of_numeric(wanted, held) if wanted.name == "numeric" else _of_length(source, wanted, held)


def _of_length(source: str, wanted: _Type, held: _Type) -> TypeChange | None:
    if wanted.size is not None and held.size is not None and wanted.size <= held.size:
        return None
    if held.name != VARCHAR:
        return TypeChange(source, in_place=False)
    if wanted.name in CHARS:
        # Use varchar instead of char, because PostgreSQL would convert each value to char.
        source = VARCHAR + ("" if wanted.size is None else f"({wanted.size})") + held.array
    return TypeChange(source, in_place=not held.array)


def _of_numeric(wanted: _Type, held: _Type) -> TypeChange | None:
    if wanted.size is None:
        return TypeChange(f"numeric{held.array}", in_place=not held.array)
    wanted_scale, held_scale = wanted.scale or 0, held.scale or 0
    digits, scale = max(wanted.digits, held.digits), max(wanted_scale, held_scale)
    if (digits, scale) == (held.digits, held_scale):
        return None
    # Numbers are stored with their decimal places, so a change of scale rewrites every row.
    in_place = scale == held_scale and not held.array
    return TypeChange(f"numeric({digits + scale},{scale}){held.array}", in_place)


def _parsed(type_: str) -> _Type | None:
    found = _TYPE.fullmatch(type_)
    if found is None:
        return None
    size, scale = (None if found[part] is None else int(found[part]) for part in ("size", "scale"))
    return _Type(found["name"] + (found["rest"] or ""), size, scale, found["array"])
