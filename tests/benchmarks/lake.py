"""Batches into an Iceberg and a Delta table. Executors are compared with ``df.write.parquet``, and a small batch with
the same batch into PostgreSQL. For an Iceberg table, a mirror of few keys is compared with writing its files again.

``ROWS`` says how many rows executors write, ``ROUNDS`` how often all is measured.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake import formats, write
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.merge import merge
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.spark.lake_sink import lake_sink
from airflow_pgchange.spark.table_sink import table_sink
from tests.benchmarks.measure import Report, ratio, section, side_by_side, wall
from tests.benchmarks.spark import movements, session
from tests.deltas import DeltaLake, made
from tests.lakes import TABLE, Lake
from tests.staging import BATCH

ROWS = int(os.environ.get("ROWS", "3000000"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
SMALL = 1000
FILES = 3
ONE_PERCENT = 100
"""The mirror changes one key in this number of keys."""

NUMBERS = count(1)
LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch"
"""From version 4.1 on, Spark computes the size of a batch for Python after each row, to compare it with this limit."""
NO_LIMIT = str(2**31 - 1)
"""With this value Spark computes nothing."""


def run(conninfo: str, report: Report) -> None:
    spark = session()
    with tempfile.TemporaryDirectory(prefix="pgchange-") as folder:
        lake = Lake(conninfo, Path(folder))
        with section(f"{ROWS:,} rows by executors"):
            executors(spark, lake, report)
        with section(f"a batch of {SMALL:,} rows, staged and committed"):
            small(spark, lake, report)
        with section(f"a mirror of 1 % of the keys of {ROWS:,} rows in {FILES} files"):
            mirror(lake, report)
    spark.stop()


def another() -> Batch:
    number = next(NUMBERS)
    return replace(BATCH, id=f"batch {number}", version=number)


def staged(conninfo: str, into: LakeTable, frame: DataFrame, *, on_driver: bool = False) -> None:
    batch = another()
    sink = lake_sink(conninfo, batch, into, frame, key=(), mode=Mode.APPEND)
    result = sink.stage_small(frame.toArrow()) if on_driver else sink.stage(frame)
    with psycopg.connect(conninfo) as connection:
        formats.commit(connection, batch, result)


def executors(spark: SparkSession, lake: Lake, report: Report) -> None:
    frame = movements(spark, ROWS)
    schema = frame.limit(1).toArrow().schema
    table, delta = lake.table(schema), DeltaLake(Path(lake.folder)).table(schema)

    def ours(into: LakeTable, limit: str) -> Callable[[], float]:
        def timed() -> float:
            spark.conf.set(LIMIT, limit)
            return wall(lambda: staged(lake.conninfo, into, frame))

        return timed

    def parquet(codec: str) -> Callable[[], float]:
        folder = f"{lake.folder}/plain-{codec}"
        writer = frame.write.mode("overwrite").option("compression", codec)
        return lambda: wall(lambda: writer.parquet(folder))

    usual = spark.conf.get(LIMIT)
    assert usual is not None
    tables = (ours(into, limit) for into in (TABLE, delta) for limit in (usual, NO_LIMIT))
    contenders = *tables, parquet("zstd"), parquet("snappy")
    for warm in contenders:
        warm()
    lakes, unlimited, deltas, unlimited_deltas, zstd, snappy = side_by_side(ROUNDS, *contenders)
    report.say("df.write.parquet with zstd, Iceberg's codec", statistics.median(zstd), "s")
    report.say("df.write.parquet with snappy, Spark's and Delta's codec", statistics.median(snappy), "s")
    for name, usually, without, plain, codec in (
        ("Iceberg", lakes, unlimited, zstd, "zstd"),
        ("Delta", deltas, unlimited_deltas, snappy, "snappy"),
    ):
        report.say(f"appended to {name}", statistics.median(usually), "s")
        report.say("the same without a limit of bytes in a batch", statistics.median(without), "s")
        report.say(f"speed, of df.write.parquet with {codec}", ratio(plain, usually), "", least=0.8)
        report.say(
            f"speed without that limit, of df.write.parquet with {codec}",
            ratio(plain, without),
            "",
            least=0.8,
        )
    lake.catalog.drop_table(table.name())


def small(spark: SparkSession, lake: Lake, report: Report) -> None:
    computed = movements(spark, SMALL)
    frame = spark.createDataFrame(computed.toArrow(), computed.schema)
    schema = frame.toArrow().schema
    lake.table(schema)
    delta = made(f"{lake.folder}/small", schema)
    with psycopg.connect(lake.conninfo, autocommit=True) as connection:
        connection.execute(
            "create table movement (id bigint, kind text, flight_date date, carrier text, flight int, origin text, "
            "dest text, at timestamp, delay int)"
        )

    def postgres() -> None:
        batch = another()
        sink = table_sink(
            lake.conninfo, batch, "movement", frame, key=(), mode=Mode.APPEND, copied=None, source=None,
            note=lambda step, how_far: None,
        )  # fmt: skip
        result = sink.stage_small(frame.toArrow())
        with psycopg.connect(lake.conninfo) as connection:
            merge(connection, batch, [result])

    def into_lake(into: LakeTable) -> None:
        staged(lake.conninfo, into, frame, on_driver=True)

    writes = partial(into_lake, TABLE), partial(into_lake, delta), postgres
    for warm in writes:
        warm()
    lakes, deltas, tables = side_by_side(3 * ROUNDS, *(partial(wall, each) for each in writes))
    report.say("into PostgreSQL", statistics.median(tables), "s")
    for name, took in (("Iceberg", lakes), ("Delta", deltas)):
        more = [ours - theirs for ours, theirs in zip(took, tables, strict=True)]
        report.say(f"into {name}", statistics.median(took), "s")
        report.say(f"more for {name}", statistics.median(more), "s", most=0.3)


def mirror(lake: Lake, report: Report) -> None:
    """Measure a mirror that changes one row in a hundred: only among the last rows, which are in one file, or among
    all rows."""
    schema = pa.schema([("id", pa.int64()), ("account", pa.string()), ("cents", pa.int64())])
    table = lake.table(schema, "mirrored")
    mirrored = replace(TABLE, table="sales.mirrored")
    each = ROWS // FILES

    def some(first: int, upto: int, step: int = 1) -> pa.Table:
        ids = range(first, upto, step)
        return pa.table([ids, [f"account {id % 9999}" for id in ids], ids], schema=schema)

    def written(rows: pa.Table, **options: Any) -> None:
        with psycopg.connect(lake.conninfo) as connection:
            write(connection, another(), mirrored, rows, **options)

    def compare(name: str, changed: pa.Table, first: int) -> None:
        def ours() -> float:
            return wall(lambda: written(changed, mode="mirror", key="id"))

        def anew() -> float:
            """Read the files that have the keys, and write all of their rows again. Return the seconds."""
            files = [task.file.file_path for task in table.refresh().scan(f"id >= {first}").plan_files()]

            def write_all() -> None:
                for path in (file.removeprefix("file://") for file in files):
                    pq.write_table(pq.read_table(path), f"{path}.anew", compression="zstd")

            return wall(write_all)

        ours()
        anew()
        lakes, plain = side_by_side(ROUNDS, ours, anew)
        report.say(f"mirrored, {name}", statistics.median(lakes), "s")
        report.say("the same files alone written anew", statistics.median(plain), "s")
        report.say("cost, of writing the files anew", ratio(lakes, plain), "", most=3)

    for number in range(FILES):
        written(some(number * each, (number + 1) * each))
    compare("keys of one file", some(ROWS - each, ROWS, ONE_PERCENT // FILES), ROWS - each)
    compare("keys of all files", some(0, ROWS, ONE_PERCENT), 0)
