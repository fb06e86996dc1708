"""Errors for values that Spark or PostgreSQL cannot hold. They name the table, the column and the row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
from adbc_driver_manager import Error as AdbcError
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import BatchIncomplete, ServerUnavailable, UnsupportedType
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.spark.types import Column, session

T = TypeVar("T")
SHOWN = 80
"""The number of characters of a value that an error shows."""
AS_TEXT = "cast the column to text in a view and read that"
AS_BYTES = "read it as bytea, by convert_to(column, 'SQL_ASCII') in a view"


@dataclass(frozen=True)
class Rows:
    """The names that errors use for rows: ``of`` is their table or feed, and the columns ``key`` identify a row."""

    of: str
    key: tuple[str, ...]

    def unreadable(
        self, row: Mapping[str, object], column: str, problem: str, advice: str = AS_TEXT
    ) -> UnsupportedType:
        """Return the error for a value in PostgreSQL that Spark cannot hold."""
        return UnsupportedType(
            f'{self.of}: column "{column}" holds {problem}, which Spark has no value for{self._where(row)}: '
            f"{advice}, or leave it out with columns=[...]"
        )

    def unwritable(self, row: Mapping[str, object], column: str) -> UnsupportedType:
        """Return the error for a text in Spark that PostgreSQL cannot store."""
        return UnsupportedType(
            f'{self.of}: column "{column}" holds a text with a NUL character, {shown(row[column])}, which PostgreSQL has '
            f"no value for{self._where(row)}: take it out in Spark, as by regexp_replace(column, '\\\\x00', '')"
        )

    def _where(self, row: Mapping[str, object]) -> str:
        return "".join(f", where {name} is {shown(row[name])}" for name in self.key)


def shown(value: object) -> str:
    """Return a value as an error shows it."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    printable = text if text.isprintable() else repr(text)
    return printable if len(printable) <= SHOWN else f"{printable[:SHOWN]}..."


def nul_found(batch: pa.RecordBatch, rows: Rows) -> UnsupportedType | None:
    """Return the error for the first text with a NUL character; None if there is none."""
    for index, field in enumerate(batch.schema):
        array = batch.column(index)
        if not _may_hold_nul(array.flatten() if pa.types.is_list(field.type) else array):
            continue
        for row, value in enumerate(array.to_pylist()):
            if any("\0" in text for text in _each(value, str)):
                return rows.unwritable(record(batch, row, (*rows.key, field.name)), field.name)
    return None


def _may_hold_nul(array: Any) -> bool:
    """Search the bytes of the whole array, because looking at each text takes a hundred times as long. Some bytes may
    belong to no row."""
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        return False
    characters = array.buffers()[-1]
    return characters is not None and b"\0" in characters.to_pybytes()


def record(batch: pa.RecordBatch, row: int, names: Sequence[str]) -> dict[str, object]:
    """Return some columns of a row. Python may be unable to hold the values of the others, too."""
    return {name: batch.column(name)[row].as_py() for name in names}


@contextmanager
def bytes_named(server: str, query: str, columns: Sequence[Column], rows: Rows) -> Iterator[None]:
    """Name the column and the row if a query fails by bytes that are not UTF-8.

    A database in SQL_ASCII may hold such bytes, and the server's error names neither.
    """
    try:
        yield
    except (AdbcError, OSError, BatchIncomplete):
        with suppress(ServerUnavailable):
            _name_bytes(server, query, columns, rows)
        raise


def _name_bytes(server: str, query: str, columns: Sequence[Column], rows: Rows) -> None:
    with (
        connect(make_conninfo(server, client_encoding="SQL_ASCII")) as connection,
        connection.cursor() as cursor,
    ):
        if connection.info.parameter_status("server_encoding") != "SQL_ASCII":
            return
        connection.execute(session(local=False).encode())
        for values in cursor.stream(query.encode()):
            row = dict(zip((column.name for column in columns), values, strict=False))
            for name, value in row.items():
                if not all(map(_is_utf8, _each(value, bytes))):
                    problem = f"bytes that are no UTF-8, {shown(value)}"
                    raise rows.unreadable(row, name, problem, AS_BYTES)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _each(value: object, kind: type[T]) -> Iterator[T]:
    """Yield the value, or the elements of a list, that have this type."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, kind):
            yield one
