"""Read and write PostgreSQL as Arrow, by ADBC. The driver does so for a small batch, and each executor for its
partition.

ADBC is used below its DBAPI, which imports pandas: a second in each of Spark's many Python processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_manager import Error as AdbcError
from adbc_driver_manager import StatementOptions
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import BatchIncomplete, MergeRefused, ServerUnavailable
from airflow_pgchange.feeds.batch import Partition
from airflow_pgchange.feeds.connections import complete
from airflow_pgchange.feeds.reading import connected, expect
from airflow_pgchange.results.staging import ATTEMPT, SCHEMA
from airflow_pgchange.spark.types import Column, reading_query, session
from airflow_pgchange.spark.unsupported_values import Rows, bytes_named, nul_found, record, shown
from airflow_pgchange.spark.watched_connections import transaction

STANDBY_TRIES = 6
LOST = ("08", "57P", "25006")
"""SQLSTATEs of a server that shuts down, or that accepts no writes."""
REFUSED = ("22", "54")
"""SQLSTATEs of rows that the server refuses: data that it cannot store, and limits."""


def read(
    source: str,
    lsn: str | None,
    partition: Partition,
    columns: Sequence[Column],
    schema: pa.Schema,
    *,
    rows: Rows,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition as record batches of ``schema``.

    Wait first until the server has replayed ``lsn``. A standby may cancel a query at any time. So there the whole
    partition is read before the first record batch is yielded, and read again after a cancellation. Raises
    BatchIncomplete after the last record batch if the number of rows is not that of the batch. Raises UnsupportedType
    for a value that Spark cannot hold.
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
    count = 0
    with bytes_named(server, query, columns, rows):
        for batch in _read_whole(server, query) if on_standby else _stream(server, query):
            count += batch.num_rows
            yield _converted(batch, columns, schema, rows)
    expect(partition, count)


def read_whole(
    server: str, query: str, columns: Sequence[Column], schema: pa.Schema, *, rows: Rows
) -> list[pa.RecordBatch]:
    """Return all rows of a query. Raises ServerUnavailable if the connection fails before the last row."""
    reading = reading_query(query, columns)
    # An error in the middle of a stream comes without its SQLSTATE, and is taken for a lost connection.
    try:
        with bytes_named(server, reading, columns, rows):
            batches = list(_stream(server, reading))
    except (AdbcError, OSError) as error:
        state = getattr(error, "sqlstate", None) or ""
        if state and not state.startswith(LOST):
            raise
        raise ServerUnavailable(f"a read ended early: {str(error).strip()}") from error
    return [_converted(batch, columns, schema, rows) for batch in batches]


def write(results: str, table: str, attempt: int, batches: Iterator[pa.RecordBatch], *, rows: Rows) -> int:
    """Stage record batches as rows of one task attempt, in one transaction, and return the number of rows.

    Raises UnsupportedType for a text that PostgreSQL cannot store, and MergeRefused for other rows that it refuses.
    """
    first = next(batches, None)
    if first is None:
        return 0
    written, refused = 0, None

    def marked() -> Iterator[pa.RecordBatch]:
        nonlocal written, refused
        batch: pa.RecordBatch | None = first
        while batch is not None:
            written += batch.num_rows
            # The driver turns an exception into a text, so keep the exception in ``refused``.
            if refused := nul_found(batch, rows):
                raise refused
            yield _marked(batch, attempt)
            with staging.computing():
                batch = next(batches, None)

    reader = pa.RecordBatchReader.from_batches(_marked(first, attempt).schema, marked())
    target = {
        StatementOptions.INGEST_TARGET_DB_SCHEMA.value: SCHEMA,
        StatementOptions.INGEST_TARGET_TABLE.value: table,
        StatementOptions.INGEST_MODE.value: "adbc.ingest.mode.append",
    }
    try:
        with transaction(complete(results, primary=True)) as staging:
            staging.statement.set_options(**target)
            staging.statement.bind_stream(reader)
            staging.update()
    except AdbcError as error:
        if refused is not None:
            raise refused from None
        if not (error.sqlstate or "").startswith(REFUSED):
            raise
        raise MergeRefused(f"{rows.of}: {_message_of(error)}: nothing was written") from error
    return written


def _stream(server: str, query: str) -> Iterator[pa.RecordBatch]:
    with transaction(server) as reading:
        for _ in reading.batches(session(local=True)):
            pass
        yield from reading.batches(query)


def _read_whole(server: str, query: str) -> list[pa.RecordBatch]:
    """Return all rows of a query. Retry after any error, because a cancellation in the middle comes without its
    SQLSTATE."""
    message = ""
    for attempt in range(STANDBY_TRIES):
        try:
            return list(_stream(server, query))
        except (AdbcError, OSError) as error:
            message = str(error)
            time.sleep(0.1 * 2**attempt)
    raise BatchIncomplete(
        f"a standby failed {STANDBY_TRIES} times to give a partition ({message.strip()}): if it cancels queries, raise "
        "its max_standby_streaming_delay, set hot_standby_feedback, or read from the primary"
    )


def _converted(
    batch: pa.RecordBatch, columns: Sequence[Column], schema: pa.Schema, rows: Rows
) -> pa.RecordBatch:
    if batch.num_columns > len(columns) and batch.column(len(columns)).null_count < batch.num_rows:
        indexes = batch.column(len(columns))
        row = pc.index(indexes.is_valid(), True).as_py()
        column = columns[indexes[row].as_py()]
        raise rows.unreadable(record(batch, row, rows.key), column.name, column.problem)
    arrays = []
    for index, column in enumerate(columns):
        array, kind = batch.column(index), schema.field(index).type
        try:
            arrays.append(pc.cast(array, kind))
        except pa.ArrowInvalid as error:
            row = next(row for row in range(len(array)) if not _is_castable(array.take([row]), kind))
            problem = f"{shown(array[row].as_py())}, outside the range of its type ({error})"
            raise rows.unreadable(record(batch, row, rows.key), column.name, problem) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _is_castable(array: Any, kind: Any) -> bool:
    try:
        pc.cast(array, kind)
    except pa.ArrowInvalid:
        return False
    return True


def _message_of(error: AdbcError) -> str:
    """Return PostgreSQL's message, without the name of the staging table."""
    return str(error).partition("ERROR:")[2].partition("\n")[0].strip() or str(error)


def _marked(batch: pa.RecordBatch, attempt: int) -> pa.RecordBatch:
    attempts = pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows)
    return pa.RecordBatch.from_arrays(
        [attempts, *batch.columns], schema=pa.schema([pa.field(ATTEMPT, pa.int64()), *batch.schema])
    )
