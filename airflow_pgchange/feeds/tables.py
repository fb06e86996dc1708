"""Names of tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg import errors, sql

from airflow_pgchange.errors import InvalidArgument

_PART = r'"(?:[^"]|"")+"|[^".][^.]*'
NAME = re.compile(rf"(?:({_PART})\.)?({_PART})")
"""Groups: the schema, and the name."""


def table_parts(table: str) -> tuple[str, ...]:
    """Schema and name, or only the name, that ``schema.table`` or ``table`` means.

    A part in double quotes may hold anything, as in SQL; one without is taken as it stands, whatever its letters. Raises
    InvalidArgument for anything else.
    """
    match = NAME.fullmatch(table)
    if match is None:
        raise InvalidArgument(f"{table!r} is not the name of a table: write it as schema.table")
    return tuple(_unquoted(part) for part in match.groups() if part)


def table_identifier(table: str) -> sql.Identifier:
    """The same as an identifier; raises InvalidArgument."""
    return sql.Identifier(*table_parts(table))


@contextmanager
def found(table: str) -> Iterator[None]:
    """Raises InvalidArgument, with the name, where a statement about a table finds none."""
    try:
        yield
    except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
        raise InvalidArgument(f"there is no table {table} in this database") from error


def quoted(name: str) -> str:
    """A name as a part that ``table_parts`` understands."""
    if "." not in name and not name.startswith('"'):
        return name
    return '"' + name.replace('"', '""') + '"'


def named(template: str, tube: str, table: str) -> str:
    """``template`` with ``{tube}`` and ``{table}`` filled in. Raises InvalidArgument where it holds other fields."""
    try:
        return template.format(tube=quoted(tube), table=quoted(table))
    except (KeyError, IndexError, ValueError) as error:
        raise InvalidArgument(
            f"{template!r}: only {{tube}} and {{table}} can be filled in, and {error} is neither"
        ) from error


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part
