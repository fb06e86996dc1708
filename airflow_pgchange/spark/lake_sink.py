"""The sink for tables of a lake: it writes a frame into data files. Each task returns the names of its files.

Retries and speculative tasks leave further files behind. Spark keeps one result for each partition, and only the files
in these results are committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import pyarrow as pa
from pyspark.sql import DataFrame

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.lake.formats import FileWriter, prepared
from airflow_pgchange.lake.rows import write_marked
from airflow_pgchange.lake.staged_files import Files, StagedFiles
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.spark.types import arrow_schema


@dataclass(frozen=True)
class LakeSink:
    """A writer of data files, and the description of the files, which is still empty."""

    writer: FileWriter
    staged: StagedFiles

    def stage(self, frame: DataFrame) -> StagedFiles:
        """Write the frame from the executors, whose Python needs the library of the format."""
        # Rename the columns: Spark would take a dot in a column's name for a path into a struct.
        plain = frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))
        write = _writing(self.writer, self.staged.key, frame.columns)
        written = [json.loads(row["files"]) for row in plain.mapInArrow(write, "files string").collect()]
        return self.staged.of(
            Files(
                tuple(file for task in written for file in task["files"]),
                tuple(path for task in written for path in task["gone"]),
            )
        )

    def stage_small(self, rows: pa.Table) -> StagedFiles:
        """Write the rows of a frame from the driver."""
        return self.staged.of(write_marked(self.writer, self.staged.key, rows.to_batches()))


def lake_sink(
    results: str,
    batch: Batch,
    into: LakeTable,
    frame: DataFrame,
    *,
    key: tuple[str, ...],
    mode: Mode,
    evolve: bool = False,
    note: Callable[[str, str], None] = lambda step, how_far: None,
) -> LakeSink:
    """Return the sink for a frame. Raises MergeRefused if the frame's schema does not fit the table.

    ``evolve``: the table first gets the columns that it lacks.
    """
    rows = arrow_schema(frame.schema)
    with connect(results, primary=True) as connection:
        return LakeSink(
            *prepared(connection, batch, into, rows, key=key, mode=mode, evolve=evolve, note=note)
        )


def _writing(
    writer: FileWriter, key: tuple[str, ...], names: list[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = write_marked(writer, key, (batch.rename_columns(names) for batch in batches))
        yield pa.RecordBatch.from_pydict({"files": [json.dumps(asdict(files))]})

    return write
