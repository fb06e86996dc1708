"""Write data files of a Delta table in any process. No version names the files before the commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError

from airflow_pgchange.errors import ConsumerBusy, MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake.delta import data_files, object_store, schema_check
from airflow_pgchange.lake.delta.data_files import Layout
from airflow_pgchange.lake.delta.error_translation import refusals
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.staged_files import Files
from airflow_pgchange.lake.tables import Delta
from airflow_pgchange.results.merge_modes import Mode


@dataclass(frozen=True)
class FileWriter:
    """The table as it is when the rows are staged."""

    lake: Delta
    layout: Layout

    @property
    def location(self) -> str:
        """The location of the table as a URI."""
        return object_store.uri(self.lake)

    def write(self, rows: Iterable[pa.RecordBatch], gone: Iterable[pa.RecordBatch] = ()) -> Files:
        """Write rows, and the keys of rows to delete, into new files of the table."""
        with refusals(self.lake):
            files = tuple(data_files.written(self.layout, map(self._fitted, rows)))
            keys = [self._fitted(batch) for batch in gone if batch.num_rows]
        if not keys:
            return Files(files)
        path = data_files.new_path(self.layout, "gone")
        with object_store.files(self.layout.location, self.layout.options).open_output_stream(path) as file:
            pq.write_table(pa.Table.from_batches(keys), file)
        return Files(files, (path,))

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the same values in the encodings that Delta has."""
        fields = [self.layout.schema.field(name) for name in batch.schema.names]
        for field in fields:
            if not field.nullable and batch.column(field.name).null_count:
                raise MergeRefused(
                    f"{self.lake}: the column {field.name!r} may not be NULL, but some rows have a NULL"
                )
        return batch.cast(pa.schema(fields))


def writer_of(
    connection: psycopg.Connection[Any],
    batch: Batch,
    lake: Delta,
    rows: pa.Schema,
    *,
    key: tuple[str, ...],
    mode: Mode,
) -> FileWriter:
    """Return the writer of files with rows of this schema, if they fit the table."""
    with refusals(lake):
        table = object_store.opened(lake)
        schema_check.check_table(lake, table, mode)
        schema_check.check_rows(lake, table, rows, key, mode)
        return FileWriter(lake, schema_check.layout(lake, table, Attempt.of(batch.id, batch.attempt)))


def evolve(
    connection: psycopg.Connection[Any], lake: Delta, rows: pa.Schema, *, key: tuple[str, ...], mode: Mode
) -> list[str]:
    """Add the columns that the rows have and the table lacks, each of which may be null, and return their names.

    Raises MergeRefused, and the table stays as it is, if the rows would still not fit it.
    """
    with refusals(lake):
        table = object_store.opened(lake)
        # Names that differ only in case are the same column in Spark.
        lowered = {field.name.lower() for field in table.schema().fields}
        added = schema_check.columns_for(lake, [field for field in rows if field.name.lower() not in lowered])
        if added.fields:
            schema_check.check_table(lake, table, mode)
            schema_check.check_rows(lake, table, rows, key, mode, added=list(pa.schema(added.to_arrow())))
            _add(lake, table, added)
    return [field.name for field in added.fields]


def _add(lake: Delta, table: DeltaTable, added: Schema) -> None:
    try:
        table.alter.add_columns(added.fields)
    except CommitFailedError as error:
        raise ConsumerBusy(
            f"{lake}: another writer changed the table while columns were added to it: nothing was changed, and the "
            "batch is tried again"
        ) from error
