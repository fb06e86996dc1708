"""Places of Delta tables: where and how any process writes data files, which no version names before the commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake.delta import data_files, fitting, store
from airflow_pgchange.lake.delta.data_files import Layout
from airflow_pgchange.lake.delta.refusals import refusals
from airflow_pgchange.lake.names import Attempt
from airflow_pgchange.lake.staged import Files
from airflow_pgchange.lake.tables import Delta
from airflow_pgchange.results.modes import Mode


@dataclass(frozen=True)
class Place:
    """The table as it is when the rows are staged."""

    lake: Delta
    layout: Layout

    def write(self, rows: Iterable[pa.RecordBatch], gone: Iterable[pa.RecordBatch] = ()) -> Files:
        """Write rows, and the keys of rows to delete, into new files of the table."""
        with refusals(self.lake):
            files = tuple(data_files.written(self.layout, map(self._fitted, rows)))
            keys = [self._fitted(batch) for batch in gone if batch.num_rows]
        if not keys:
            return Files(files)
        path = data_files.new_path(self.layout, "gone")
        with store.files(self.layout.location, self.layout.options).open_output_stream(path) as file:
            pq.write_table(pa.Table.from_batches(keys), file)
        return Files(files, (path,))

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same values in the encodings that Delta has."""
        fields = [self.layout.schema.field(name) for name in batch.schema.names]
        for field in fields:
            if not field.nullable and batch.column(field.name).null_count:
                raise MergeRefused(
                    f"{self.lake}: the column {field.name!r} may not be NULL, and is in some rows"
                )
        return batch.cast(pa.schema(fields))


def place(
    connection: psycopg.Connection[Any],
    batch: Batch,
    lake: Delta,
    rows: pa.Schema,
    *,
    key: tuple[str, ...],
    mode: Mode,
) -> Place:
    """Return the place for files with rows of this schema, if they fit the table."""
    with refusals(lake):
        table = store.opened(lake)
        fitting.check_table(lake, table, mode)
        fitting.check_rows(lake, table, rows, key, mode)
        return Place(lake, fitting.layout(lake, table, Attempt.of(batch.id, batch.attempt)))


def evolve(
    connection: psycopg.Connection[Any], lake: Delta, rows: pa.Schema, *, key: tuple[str, ...], mode: Mode
) -> list[str]:
    """Raise MergeRefused if the table lacks columns of the rows: it gets none here."""
    columns = {field.name.lower() for field in store.opened(lake).schema().fields}
    if names := [name for name in rows.names if name.lower() not in columns]:
        raise MergeRefused(
            f"{lake}: the table lacks {', '.join(names)}, and evolve=True adds columns to Iceberg tables only: run alter "
            "table ... add columns in Spark"
        )
    return []
