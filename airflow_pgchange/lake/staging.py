"""Rows staged for an Iceberg table: data files beside the table's own, which no snapshot names before the ack."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadataUtil

from airflow_pgchange.lake import data_files, pointer
from airflow_pgchange.lake.tables import Iceberg
from airflow_pgchange.results.staging import TOUCHED


@dataclass(frozen=True)
class Place:
    """All that a process needs to write files of a table, wherever it runs. ``properties`` may have secrets."""

    metadata: str
    location: str
    properties: Mapping[str, Any] = field(repr=False)
    key: tuple[str, ...]

    @classmethod
    def of(cls, lake: Iceberg, table: Table, key: tuple[str, ...]) -> Place:
        return cls(table.metadata.model_dump_json(), table.metadata_location, pointer.properties(lake), key)


@dataclass(frozen=True)
class Files:
    """Data files, as ``data_files.to_json`` describes them, and the paths of files with keys of rows to delete."""

    files: tuple[Mapping[str, Any], ...] = ()
    gone: tuple[str, ...] = ()


def write(place: Place, batches: Iterable[pa.RecordBatch]) -> Files:
    """Write rows into files of the table.

    If the batches have the column ``TOUCHED``, rows in which it is true are only keys of rows to delete.
    """
    metadata = TableMetadataUtil.parse_raw(place.metadata)
    io = pointer.files_of(place.properties, place.location, metadata)
    gone: list[pa.RecordBatch] = []
    kept = _kept(map(in_utc, batches), place.key, gone)
    files = tuple(data_files.to_json(metadata, file) for file in data_files.written(metadata, io, kept))
    if not gone:
        return Files(files)
    path = load_location_provider(metadata.location, metadata.properties).new_data_location(
        f"gone-{uuid.uuid4()}.parquet"
    )
    with io.new_output(path).create() as file:
        pq.write_table(pa.Table.from_batches(gone), file)
    return Files(files, (path,))


def in_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same instants with the zone UTC, which is the only one that Iceberg knows."""
    columns = [
        column.cast(pa.timestamp(column.type.unit, "UTC"))
        if pa.types.is_timestamp(column.type) and column.type.tz is not None
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _kept(
    batches: Iterable[pa.RecordBatch], key: tuple[str, ...], gone: list[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The rows to write. The keys of rows to delete are added to ``gone``."""
    for batch in batches:
        if TOUCHED not in batch.schema.names:
            yield batch
            continue
        names = [name for name in batch.schema.names if name != TOUCHED]
        is_gone = pc.fill_null(batch.column(TOUCHED), False)
        if named := batch.filter(is_gone).select(list(key)):
            gone.append(named)
        yield batch.filter(pc.invert(is_gone)).select(names)
