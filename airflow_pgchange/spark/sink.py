"""The staging sink: a frame into a staging table, each row under the task attempt that wrote it.

Retries and speculation leave the rows of losers behind. A task that wins returns its attempt and its count as its
result, and Spark keeps one result for each partition: those are the winners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from airflow_pgchange.spark import arrow
from airflow_pgchange.spark.misfits import Rows

Winners = tuple[tuple[int, int], ...]

DRIVER = -1
"""The attempt under which the driver stages a small frame itself."""


def stage(frame: DataFrame, results: str, table: str, rows: Rows) -> Winners:
    """Write the frame from the executors; returns the winners: task attempts, each with its number of rows."""
    # Spark reads a column's name as a path of names: of ours it can make one thing alone.
    plain = frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))
    writer = _writer(results, table, frame.columns, rows)
    written = plain.mapInArrow(writer, "attempt bigint, rows bigint").collect()
    return tuple((row["attempt"], row["rows"]) for row in written)


def stage_small(frame: DataFrame, results: str, table: str, most: int, rows: Rows) -> Winners | None:
    """Write the frame from the driver, through its memory; None, and nothing is written, for over ``most`` rows."""
    taken = frame.limit(most + 1).toArrow()
    if taken.num_rows > most:
        return None
    return ((DRIVER, arrow.write(results, table, DRIVER, iter(taken.to_batches()), rows=rows)),)


def _writer(
    results: str, table: str, names: list[str], rows: Rows
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("a staging table is written inside Spark's tasks only")
        attempt = context.taskAttemptId()
        named = (batch.rename_columns(names) for batch in batches)
        count = arrow.write(results, table, attempt, named, rows=rows)
        yield pa.RecordBatch.from_pydict({"attempt": [attempt], "rows": [count]})

    return write
