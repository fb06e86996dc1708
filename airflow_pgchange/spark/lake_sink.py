"""The sink for Iceberg tables: a frame into data files, which the task names when it wins.

Retries and speculation leave the files of losers behind. Spark keeps one result for each partition, and only the files in
these results are committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pyarrow as pa
from pyspark.sql import DataFrame

from airflow_pgchange.lake import staging
from airflow_pgchange.lake.staging import Files, Place


def stage(frame: DataFrame, place: Place) -> Files:
    """Write the frame from the executors, whose Python needs PyIceberg."""
    # Spark reads a column's name as a path of names: of ours it can make one thing alone.
    plain = frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))
    found = plain.mapInArrow(_writer(place, frame.columns), "files string").collect()
    told = [json.loads(row["files"]) for row in found]
    return Files(
        tuple(file for each in told for file in each["files"]),
        tuple(path for each in told for path in each["gone"]),
    )


def stage_small(frame: DataFrame, place: Place, limit: int) -> Files | None:
    """Write the frame from the driver, through its memory; None, and nothing is written, for over ``limit`` rows."""
    taken = frame.limit(limit + 1).toArrow()
    return None if taken.num_rows > limit else staging.write(place, taken.to_batches())


def _writer(place: Place, names: list[str]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = staging.write(place, (batch.rename_columns(names) for batch in batches))
        yield pa.RecordBatch.from_pydict({"files": [json.dumps(asdict(files))]})

    return write
