"""Arrow in and out of PostgreSQL by ADBC: what the driver does for a small batch, and each executor for its part.

ADBC is used below its DBAPI, which imports pandas: a second in each of Spark's many Python processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import adbc_driver_postgresql
import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_manager import AdbcConnection, AdbcStatement, StatementOptions
from adbc_driver_manager import Error as AdbcError
from psycopg.conninfo import make_conninfo

from airflow_pgchange.feeds.batch import Partition
from airflow_pgchange.feeds.connect import complete
from airflow_pgchange.feeds.errors import BatchIncomplete, ServerUnavailable
from airflow_pgchange.feeds.reading import connected, expect
from airflow_pgchange.feeds.staging import ATTEMPT, SCHEMA
from airflow_pgchange.spark.types import MISFIT, SESSION, Column, misfit_error, reading_query

STANDBY_TRIES = 6
LOST = ("08", "57P", "25006")
"""SQLSTATEs of a server that goes, or that takes no writes."""


def read(
    source: str, lsn: str | None, partition: Partition, columns: Sequence[Column], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of a partition as record batches of ``schema``.

    Waits until the server has replayed ``lsn``. A standby may cancel a query at any time: there the partition is read
    whole before the first batch is handed on, and again when it was cancelled. Raises BatchIncomplete after the last
    batch if the rows are not as many as the batch counts, UnsupportedType for a value that Spark has no value for.
    """
    with connected(source, lsn) as connection:
        on_standby = connection.execute("select pg_catalog.pg_is_in_recovery()").fetchone() == (True,)
        info = connection.info
        server = make_conninfo(
            complete(source),
            host=info.host,
            port=info.port,
            **({"hostaddr": info.hostaddr} if info.hostaddr else {}),
        )
    query = reading_query(partition.query, columns)
    batches = _read_whole(server, query) if on_standby else _stream(server, query)
    found = 0
    for batch in batches:
        found += batch.num_rows
        yield _converted(batch, columns, schema)
    expect(partition, found)


def read_whole(server: str, query: str, columns: Sequence[Column], schema: pa.Schema) -> list[pa.RecordBatch]:
    """All rows of a query, or none: raises ServerUnavailable where the server is lost before the last, whose error in
    the middle of a stream comes without its SQLSTATE."""
    try:
        batches = list(_stream(server, reading_query(query, columns)))
    except (AdbcError, OSError) as error:
        state = getattr(error, "sqlstate", None) or ""
        if state and not state.startswith(LOST):
            raise
        raise ServerUnavailable(f"a read ended early: {str(error).strip()}") from error
    return [_converted(batch, columns, schema) for batch in batches]


def write(results: str, table: str, attempt: int, batches: Iterator[pa.RecordBatch]) -> int:
    """Stage record batches as rows of one task attempt, in one transaction; returns how many rows there were."""
    first = next(batches, None)
    if first is None:
        return 0
    written = 0

    def marked() -> Iterator[pa.RecordBatch]:
        nonlocal written
        batch: pa.RecordBatch | None = first
        while batch is not None:
            written += batch.num_rows
            yield _marked(batch, attempt)
            batch = next(batches, None)

    reader = pa.RecordBatchReader.from_batches(_marked(first, attempt).schema, marked())
    target = {
        StatementOptions.INGEST_TARGET_DB_SCHEMA.value: SCHEMA,
        StatementOptions.INGEST_TARGET_TABLE.value: table,
        StatementOptions.INGEST_MODE.value: "adbc.ingest.mode.append",
    }
    with _transaction(complete(results, primary=True)) as statement:
        statement.set_options(**target)
        statement.bind_stream(reader)
        statement.execute_update()
    return written


def _stream(server: str, query: str) -> Iterator[pa.RecordBatch]:
    with _transaction(server) as statement:
        for setting in SESSION:
            statement.set_sql_query(f"set local {setting}")
            statement.execute_update()
        statement.set_sql_query(query)
        stream, _ = statement.execute_query()
        with pa.RecordBatchReader.from_stream(stream) as reader:
            yield from reader


@contextmanager
def _transaction(conninfo: str) -> Iterator[AdbcStatement]:
    """A statement in a transaction that is committed at the end."""
    with adbc_driver_postgresql.connect(conninfo) as database, AdbcConnection(database) as connection:
        connection.set_autocommit(False)
        with AdbcStatement(connection) as statement:
            yield statement
        connection.commit()


def _read_whole(server: str, query: str) -> list[pa.RecordBatch]:
    """All of it, tried again after an error: a cancellation in the middle comes without its SQLSTATE."""
    said = ""
    for attempt in range(STANDBY_TRIES):
        try:
            return list(_stream(server, query))
        except (AdbcError, OSError) as error:
            said = str(error)
            time.sleep(0.1 * 2**attempt)
    raise BatchIncomplete(
        f"a standby failed {STANDBY_TRIES} times to give a partition ({said.strip()}): if it cancels queries, raise its "
        "max_standby_streaming_delay, set hot_standby_feedback, or read from the primary"
    )


def _converted(batch: pa.RecordBatch, columns: Sequence[Column], schema: pa.Schema) -> pa.RecordBatch:
    if MISFIT in batch.schema.names:
        misfits = batch.column(MISFIT).drop_null()
        if len(misfits):
            raise misfit_error(misfits[0].as_py())
    arrays = [_cast(batch.column(column.name), column.name, schema) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: Any, name: str, schema: pa.Schema) -> Any:
    try:
        return pc.cast(array, schema.field(name).type)
    except pa.ArrowInvalid as error:
        raise misfit_error(f"{name}: a value of another range ({error})") from error


def _marked(batch: pa.RecordBatch, attempt: int) -> pa.RecordBatch:
    attempts = pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows)
    return pa.RecordBatch.from_arrays(
        [attempts, *batch.columns], schema=pa.schema([pa.field(ATTEMPT, pa.int64()), *batch.schema])
    )
