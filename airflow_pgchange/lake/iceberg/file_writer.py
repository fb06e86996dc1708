"""Write data files of an Iceberg table in any process. No snapshot names the files before the commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadataUtil

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.iceberg import data_files, metadata_pointer, schema_check
from airflow_pgchange.lake.iceberg.error_translation import refusals
from airflow_pgchange.lake.iceberg.file_names import FileId
from airflow_pgchange.lake.iceberg.schema_evolution import add_columns, lacking
from airflow_pgchange.lake.rows import normalised, normalised_schema
from airflow_pgchange.lake.staged_files import Files
from airflow_pgchange.lake.tables import Iceberg, LakeTable
from airflow_pgchange.results.merge_modes import Mode


@dataclass(frozen=True)
class FileWriter:
    """The table as it is when the rows are staged. ``properties`` may have secrets."""

    lake: LakeTable
    attempt: Attempt
    metadata: str
    location: str
    properties: Mapping[str, Any] = field(repr=False)

    def write(self, rows: Iterable[pa.RecordBatch], gone: Iterable[pa.RecordBatch] = ()) -> Files:
        """Write rows, and the keys of rows to delete, into new files of the table."""
        metadata = TableMetadataUtil.parse_raw(self.metadata)
        io = metadata_pointer.files_of(self.properties, self.location)
        with refusals(self.lake):
            files = tuple(
                data_files.to_json(metadata, file)
                for file in data_files.written(metadata, io, self.attempt, map(normalised, rows))
            )
            keys = [batch for batch in gone if batch.num_rows]
        if not keys:
            return Files(files)
        locations = load_location_provider(metadata.location, metadata.properties)
        path = locations.new_data_location(f"gone-{FileId(self.attempt, metadata)}.parquet")
        with io.new_output(path).create() as file:
            pq.write_table(pa.Table.from_batches(keys), file)
        return Files(files, (path,))


def writer_of(
    connection: psycopg.Connection[Any],
    batch: Batch,
    lake: Iceberg,
    rows: pa.Schema,
    *,
    key: tuple[str, ...],
    mode: Mode,
) -> FileWriter:
    """Return the writer of files with rows of this schema, if they fit the table."""
    return writer_in(metadata_pointer.opened(connection, lake), batch, lake, rows, key=key, mode=mode)


def evolve(
    connection: psycopg.Connection[Any],
    lake: Iceberg,
    rows: pa.Schema,
    *,
    key: tuple[str, ...],
    mode: Mode,
) -> list[str]:
    """Add the columns that the table lacks, in a transaction or a savepoint of its own, and return their names."""
    if not lacking(metadata_pointer.opened(connection, lake), rows):
        return []
    with connection.transaction():
        return add_columns(lake, metadata_pointer.opened(connection, lake, locked=True), rows, key, mode)


def writer_in(
    table: Table, batch: Batch, lake: LakeTable, rows: pa.Schema, *, key: tuple[str, ...], mode: Mode
) -> FileWriter:
    """Check that the rows fit a table, and return the writer of its files."""
    schema_check.check(lake, table.metadata, normalised_schema(rows), key, mode)
    return FileWriter(
        lake,
        Attempt.of(batch.id, batch.attempt),
        table.metadata.model_dump_json(),
        table.location(),
        table.io.properties,
    )
