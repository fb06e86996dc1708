"""Names of tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg import errors, sql

from airflow_pgchange.errors import InvalidArgument

_PART = r'"(?:[^"]|"")+"|[^".][^.]*'
NAME = re.compile(rf"(?:({_PART})\.)?({_PART})")
"""The pattern of a table's name. Its groups are the schema and the name."""


def table_parts(table: str) -> tuple[str, ...]:
    """Return the schema and the name in ``schema.table``, or only the name in ``table``.

    A part in double quotes may contain any character, as in SQL. A part without quotes keeps its capital letters. Raises
    InvalidArgument for another text.
    """
    match = NAME.fullmatch(table)
    if match is None:
        raise InvalidArgument(f"{table!r} is not the name of a table: write it as schema.table")
    return tuple(_unquoted(part) for part in match.groups() if part)


def table_identifier(table: str) -> sql.Identifier:
    """Return the name of a table as an identifier. Raises InvalidArgument."""
    return sql.Identifier(*table_parts(table))


@contextmanager
def requires_table(table: str) -> Iterator[None]:
    """Raise InvalidArgument with the table's name if a statement in the block does not find the table."""
    try:
        yield
    except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
        raise InvalidArgument(f"there is no table {table} in this database") from error


def quoted(name: str) -> str:
    """Return a name in the form that ``table_parts`` reads, in quotes if needed."""
    if "." not in name and not name.startswith('"'):
        return name
    return '"' + name.replace('"', '""') + '"'


def named(template: str, tube: str, table: str) -> str:
    """Fill in ``{tube}`` and ``{table}`` in ``template``. Raises InvalidArgument if it has other fields."""
    try:
        return template.format(tube=quoted(tube), table=quoted(table))
    except (KeyError, IndexError, ValueError) as error:
        raise InvalidArgument(
            f"{template!r}: only {{tube}} and {{table}} can be filled in, and {error} is neither"
        ) from error


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part
