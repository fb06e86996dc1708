"""Call the function of a Spark job with changes that a test gives, in its Spark session. Needs the extra ``spark``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

from airflow_pgchange.errors import ExtraMissing, InvalidArgument, MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import begun, connect
from airflow_pgchange.feeds.feed import Feed, columns_of
from airflow_pgchange.feeds.key_columns import KeyNames
from airflow_pgchange.feeds.keys import BIGINT
from airflow_pgchange.feeds.reading import KEY_PART
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached_tables import Attached
from airflow_pgchange.results.column_comparison import columns_of_frame
from airflow_pgchange.results.merge import merge
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.schema_evolution import Source
from airflow_pgchange.results.staging import TOUCHED, Copied
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.mirror import marked
from airflow_pgchange.spark.read_options import CHANGE, ReadOptions
from airflow_pgchange.spark.request import Work
from airflow_pgchange.spark.types import DECIMAL, staging_types
from airflow_pgchange.testing.changes import BATCH_ID, Given, Row, batch_of_rows, rows_of

try:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as f
    from pyspark.sql import types as t
except ImportError as error:
    raise ExtraMissing(
        f"tests of Spark jobs need {error.name}: pip install 'airflow-provider-pgchange[spark]'"
    ) from error

if TYPE_CHECKING:
    from airflow_pgchange.lake.tables import LakeTable

TYPES: Mapping[str, t.DataType] = {
    "bigint": t.LongType(),
    "integer": t.IntegerType(),
    "boolean": t.BooleanType(),
    "timestamptz": t.TimestampType(),
    "text[]": t.ArrayType(t.StringType()),
}
"""The Spark types of PostgreSQL types. Columns of other types are text, as with the data source."""
KEYS: Mapping[str, t.DataType] = {
    "bigint": t.LongType(),
    "oid": t.LongType(),
    "boolean": t.BooleanType(),
    "numeric": DECIMAL,
    "date": t.DateType(),
    "timestamp without time zone": t.TimestampNTZType(),
    "timestamp with time zone": t.TimestampType(),
}
"""The Spark types of key types whose values are read from the text of an id."""


@dataclass(frozen=True)
class Merged:
    """One merge of a job: the rows of ``frame`` into the table ``into``. In mode ``mirror``, ``gone`` has the keys that
    the merge would delete."""

    into: str
    key: tuple[str, ...]
    mode: Mode
    frame: DataFrame
    gone: DataFrame | None = None


@dataclass(frozen=True)
class SparkRun:
    """A batch, and the merges of the function, in order. They are empty if the results were merged into PostgreSQL."""

    batch: Batch
    merged: tuple[Merged, ...] = ()


class FakeJob(Job):
    """A job with the changes and tables of a test. It keeps its merges, or stages them if there is a database of
    results."""

    def __init__(
        self,
        spark: SparkSession,
        work: Work,
        changes: DataFrame,
        tables: Mapping[str, DataFrame],
        attached: Sequence[Attached],
    ) -> None:
        super().__init__(spark, work)
        self.merged: list[Merged] = []
        self._changes = changes
        self._tables = tables
        self._attached = attached

    def _is_small(self) -> bool:
        """The given rows are in this session already, so the job registers no data source."""
        return True

    def _attached_to(self, feed: TubeFeed) -> Sequence[Attached]:
        return self._attached

    def mirror(
        self,
        table: str | Attached,
        into: str | LakeTable,
        columns: Sequence[str] | None = None,
        *,
        key: KeyNames | None = None,
        shard: int | None = None,
        evolve: bool = False,
    ) -> None:
        if self._work.results:
            super().mirror(table, into, columns, key=key, shard=shard, evolve=evolve)
            return
        read_options = ReadOptions.of(table, key, shard, columns=columns, which="every")
        assert read_options.key is not None
        frame = marked(self._frame(read_options), read_options.key)
        copy = table.copy(into) if isinstance(table, Attached) and isinstance(into, str) else str(into)
        self._stage(copy, read_options.key, Mode.MIRROR, frame.drop(TOUCHED), lambda: frame)

    def _stage(
        self,
        into: str | LakeTable,
        keys: tuple[str, ...],
        mode: Mode,
        shown: DataFrame,
        rows: Callable[[], DataFrame],
        *,
        copied: Copied | None = None,
        source: Source | None = None,
        evolve: bool = False,
    ) -> None:
        if self._work.results:
            super()._stage(into, keys, mode, shown, rows, copied=copied, source=source, evolve=evolve)
            return
        staging_types(shown.schema)
        if missing := [name for name in keys if name not in shown.columns]:
            raise MergeRefused(f'{into}: the frame lacks "{missing[0]}" of the key: add the column')
        frame = rows()
        if TOUCHED not in frame.columns:
            self.merged.append(Merged(str(into), keys, mode, frame))
            return
        there = frame.where(~f.coalesce(f.col(TOUCHED), f.lit(False))).drop(TOUCHED)
        touched = frame.where(f.col(TOUCHED)).select(*keys).distinct()
        gone = touched.join(there.select(*keys), list(keys), "left_anti")
        self.merged.append(Merged(str(into), keys, mode, there, gone))

    def _source(self, table: str, frame: DataFrame) -> Source:
        """Describe the frame of the test as a source table. A frame has no lengths and no defaults."""
        return Source(table, columns_of_frame(staging_types(frame.schema)))

    def _frame(self, read_options: ReadOptions) -> DataFrame:
        changes = self._changes
        if read_options.shard is not None:
            changes = changes.where(f.col("shard") == read_options.shard)
        if read_options.table is None or read_options.key is None:
            return self._with_parts(changes, "id") if read_options.typed else changes
        if read_options.table not in self._tables:
            raise InvalidArgument(
                f"the job reads {read_options.table}, and this test has no such table: give its rows, as in "
                f"tables={{'{read_options.table}': frame}}"
            )
        table = self._tables[read_options.table]
        if read_options.columns is not None:
            table = table.select(*dict.fromkeys([*read_options.key, *read_options.columns]))
        ids = self._with_parts(changes.select(f.col("id").alias(CHANGE)), CHANGE)
        parts = [name for name in ids.columns if name != CHANGE]
        pairs = zip(parts or [CHANGE], read_options.key, strict=True)
        same = reduce(and_, (ids[part] == table[name] for part, name in pairs))
        if read_options.which == "gone":
            return ids.join(table, same, "left_anti").drop(*parts).withColumnRenamed(CHANGE, "id")
        joined = ids.join(table, same, "left" if read_options.which == "every" else "inner")
        return joined if read_options.which == "every" else joined.drop(CHANGE, *parts)

    def _with_parts(self, changes: DataFrame, id_: str) -> DataFrame:
        """Return the changes with a column for each part of their ids, as the data source adds them."""
        kinds = self.batch.key
        if kinds == BIGINT:
            return changes
        for index, kind in enumerate(kinds):
            text = f.col(id_) if len(kinds) == 1 else f.col(id_)[index]
            bytes_ = f.unhex(f.substring(text, 3, 2**31 - 1))
            value = bytes_ if kind == "bytea" else text.cast(KEYS.get(kind, t.StringType()))
            changes = changes.withColumn(KEY_PART.format(index + 1), value)
        return changes


def run_spark_once(
    work: Any,
    changes: Sequence[Given],
    *,
    spark: SparkSession,
    feed: Feed | None = None,
    tables: Mapping[str, DataFrame] | None = None,
    attached: Sequence[Attached] = (),
    task_id: str | None = None,
    postgres_conn_id: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
    key: Sequence[str] | None = None,
    attempt: int = 1,
    batch_id: str = BATCH_ID,
) -> SparkRun:
    """Call the function of a Spark job with one batch of given changes, in a session of the test.

    ``work`` is a ``@task.pgchange_spark`` in a DAG, or a function with a parameter ``job``, which needs ``feed``. Nothing
    is read from PostgreSQL: ``tables`` has the rows of the tables that the job reads, by the names that the job uses. The
    job's merges are returned. With ``postgres_conn_id`` the results are staged and merged into that database, as by the
    operator. It needs our schemas.

    No application is submitted. The test does not cover ``spark-submit``, the connection to Spark, the pickling for
    another process, and the data source.

    :param work: a function with a parameter ``job``, a DAG, or a task
    :param changes: ids, mappings with columns of the feed, or events
    :param attached: the tables attached to the tube, for ``job.attached()``
    :param key: the types of the columns of the ids, such as ``["uuid"]``; by default an int is a ``bigint`` and a str a
        ``text``
    """
    function, job_feed = _function(work, feed, task_id, arguments, context)
    rows = rows_of(job_feed, changes)
    batch = batch_of_rows(job_feed, rows, attempt, batch_id, key)
    results = _conninfo(postgres_conn_id)
    columns = columns_of(job_feed, batch)
    schema = t.StructType([t.StructField(name, TYPES.get(kind, t.StringType())) for name, kind in columns])
    frame = spark.createDataFrame([_as_read(job_feed, row) for row in rows], schema)
    job = FakeJob(spark, Work(job_feed, batch, results, results), frame, tables or {}, attached)
    function(job)
    job.ended = True
    if results:
        with connect(results, primary=True) as connection, begun(connection):
            merge(connection, batch, job.staged)
    return SparkRun(batch, tuple(job.merged))


def _function(
    work: Any,
    feed: Feed | None,
    task_id: str | None,
    arguments: Mapping[str, Any] | None,
    context: Mapping[str, Any] | None,
) -> tuple[Callable[[Job], object], Feed]:
    if callable(work):
        if feed is None:
            raise InvalidArgument(
                "a function alone has no feed: give feed=, or the DAG with the function's task"
            )
        own = dict(arguments or {})
        return lambda job: work(job, **own), feed
    # Imported here, because a test of a function alone needs no Airflow.
    from airflow_pgchange.decorators.spark import SparkDecoratedOperator  # noqa: PLC0415
    from airflow_pgchange.testing.tasks import prepared  # noqa: PLC0415
    from airflow_pgchange.utils.arguments import feed_of  # noqa: PLC0415

    operator, _ = prepared(
        work, (SparkDecoratedOperator,), task_id=task_id, arguments=arguments, context=context
    )
    return lambda job: operator.python_callable(job=job, **operator.op_kwargs), feed_of(operator.feed)


def _conninfo(postgres_conn_id: str | None) -> str:
    if postgres_conn_id is None:
        return ""
    from airflow_pgchange.hooks.pgchange import PgChangeHook  # noqa: PLC0415

    return PgChangeHook(postgres_conn_id).conninfo()


def _as_read(feed: Feed, row: Row) -> tuple[Any, ...]:
    """Return the values of a row as the data source reads them: JSON is text in Spark, and so are the parts of a key."""
    values = {
        name: json.dumps(row[name]) if kind == "jsonb" and row[name] is not None else row[name]
        for name, kind in feed.columns
    }
    if isinstance(values["id"], tuple):
        values["id"] = list(map(str, values["id"]))
    return tuple(values.values())
