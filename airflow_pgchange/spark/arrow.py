"""Arrow in and out of PostgreSQL by ADBC: what the driver does for a small batch, and each executor for its part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_manager import OperationalError
from adbc_driver_postgresql import dbapi
from psycopg.conninfo import make_conninfo

from airflow_pgchange.feeds.batch import Partition
from airflow_pgchange.feeds.connect import complete, connect
from airflow_pgchange.feeds.errors import BatchIncomplete, UnsupportedType
from airflow_pgchange.feeds.reading import caught_up, expect
from airflow_pgchange.feeds.staging import ATTEMPT, SCHEMA
from airflow_pgchange.spark.types import MISFIT, SESSION, Column, reading_query, refuse_misfit

CONFLICTS = frozenset({"40001", "40P01"})
CONFLICT_TRIES = 10


def read(
    source: str, lsn: str | None, partition: Partition, columns: Sequence[Column], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of a partition as record batches of ``schema``.

    Waits until the server has replayed ``lsn``. A standby may cancel a query at any time: there the partition is read
    whole before the first batch is handed on, and again when it was cancelled. Raises BatchIncomplete after the last
    batch if the rows are not as many as the batch counts, UnsupportedType for a value that Spark has no value for.
    """
    with connect(source) as connection:
        caught_up(connection, lsn)
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
    with dbapi.connect(complete(results, primary=True)) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest(table, reader, mode="append", db_schema_name=SCHEMA)
        connection.commit()
    return written


def _stream(server: str, query: str) -> Iterator[pa.RecordBatch]:
    with dbapi.connect(server) as connection, connection.cursor() as cursor:
        for setting in SESSION:
            cursor.execute(f"set local {setting}")
        cursor.execute(query)
        yield from cursor.fetch_record_batch()


def _read_whole(server: str, query: str) -> list[pa.RecordBatch]:
    for attempt in range(CONFLICT_TRIES):
        try:
            return list(_stream(server, query))
        except OperationalError as error:
            if error.sqlstate not in CONFLICTS:
                raise
            time.sleep(min(0.1 * 2**attempt, 5.0))
    raise BatchIncomplete(
        f"the standby cancelled the reading of a partition {CONFLICT_TRIES} times: raise its "
        "max_standby_streaming_delay, set hot_standby_feedback, or read from the primary"
    )


def _converted(batch: pa.RecordBatch, columns: Sequence[Column], schema: pa.Schema) -> pa.RecordBatch:
    misfits = batch.column(MISFIT).drop_null()
    if len(misfits):
        raise refuse_misfit(misfits[0].as_py())
    arrays = [_cast(batch.column(column.name), column.name, schema) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: Any, name: str, schema: pa.Schema) -> Any:
    try:
        return pc.cast(array, schema.field(name).type)
    except pa.ArrowInvalid as error:
        raise UnsupportedType(f'column "{name}": {error}: cast it to text in a view and read that') from error


def _marked(batch: pa.RecordBatch, attempt: int) -> pa.RecordBatch:
    attempts = pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows)
    return pa.RecordBatch.from_arrays(
        [attempts, *batch.columns], schema=pa.schema([pa.field(ATTEMPT, pa.int64()), *batch.schema])
    )
