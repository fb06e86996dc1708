"""The sink for tables of PostgreSQL. It writes a frame into a staging table, each row with the task attempt that wrote
it.

Retries and speculative tasks leave the rows of other attempts behind. Each task returns its attempt and its number of
rows, and Spark keeps one result for each partition. Only the rows of these attempts, the winners, are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.results.merge import validate
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.schema_evolution import Source, evolve
from airflow_pgchange.results.staging import Copied, Staged, create
from airflow_pgchange.spark import adbc
from airflow_pgchange.spark.types import staging_types
from airflow_pgchange.spark.unsupported_values import Rows

DRIVER = -1
"""The attempt of the rows of a small frame, which the driver stages itself."""


@dataclass(frozen=True)
class TableSink:
    """An empty staging table. ``results`` is a connection string with its password."""

    results: str = field(repr=False)
    staged: Staged

    def stage(self, frame: DataFrame) -> Staged:
        """Write the frame from the executors."""
        # Rename the columns: Spark would take a dot in a column's name for a path into a struct.
        plain = frame.toDF(*(f"c{index}" for index in range(len(frame.columns))))
        writer = _writer(self.results, self.staged.table, frame.columns, self._rows)
        written = plain.mapInArrow(writer, "attempt bigint, rows bigint").collect()
        return replace(self.staged, winners=tuple((row["attempt"], row["rows"]) for row in written))

    def stage_small(self, rows: pa.Table) -> Staged:
        """Write the rows of a frame from the driver."""
        count = adbc.write(self.results, self.staged.table, DRIVER, iter(rows.to_batches()), rows=self._rows)
        return replace(self.staged, winners=((DRIVER, count),))

    @property
    def _rows(self) -> Rows:
        return Rows(self.staged.target, self.staged.key)


def table_sink(
    results: str,
    batch: Batch,
    into: str,
    frame: DataFrame,
    *,
    key: tuple[str, ...],
    mode: Mode,
    copied: Copied | None,
    source: Source | None,
    note: Callable[[str, str], None],
) -> TableSink:
    """Create the staging table, and return its sink. Raises MergeRefused if the frame's schema does not fit the target.

    If ``source`` is given, the target first gets changes of its columns.
    """
    columns = staging_types(frame.schema)
    with connect(results, primary=True) as connection:
        fit = partial(validate, connection, into, key, mode, columns, ids=batch.key)
        if statements := evolve(connection, into, source, fit):
            note(f"altered {into}, whose old rows need a backfill", "; ".join(statements))
        table = create(connection, batch, into, list(columns.items()))
    staged = Staged(
        target=into,
        key=key,
        mode=mode,
        table=table,
        columns=tuple(columns.items()),
        winners=(),
        batch_id=batch.id,
        attempt=batch.attempt,
        copied=copied,
    )
    return TableSink(results, staged)


def _writer(
    results: str, table: str, names: list[str], rows: Rows
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("a staging table is written inside Spark's tasks only")
        attempt = context.taskAttemptId()
        named = (batch.rename_columns(names) for batch in batches)
        count = adbc.write(results, table, attempt, named, rows=rows)
        yield pa.RecordBatch.from_pydict({"attempt": [attempt], "rows": [count]})

    return write
