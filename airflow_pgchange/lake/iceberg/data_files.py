"""Data files of an Iceberg table: written by any process, and sent as JSON to the process that commits them."""

from __future__ import annotations

import itertools
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record
from pyiceberg.types import PrimitiveType

from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.iceberg.file_names import FileId
from airflow_pgchange.lake.rows import gathered

COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
BOUNDS = ("lower_bounds", "upper_bounds")


def written(
    metadata: TableMetadata, files: FileIO, attempt: Attempt, batches: Iterable[pa.RecordBatch]
) -> Iterator[DataFile]:
    """Write the rows into new data files of the table, each partition into files of its own.

    The rows are never all in memory. The files are not part of the table until a commit names them.
    """
    name, numbers = FileId(attempt, metadata), itertools.count()
    for together in gathered(batches):
        table = pa.Table.from_batches(together)
        for file in _dataframe_to_data_files(metadata, table, files, write_uuid=name, counter=numbers):
            yield _of_spec(file, metadata.default_spec_id)


def _of_spec(file: DataFile, spec: int) -> DataFile:
    """Set the id of the partition spec. PyIceberg needs it to read the file, but does not set it in a new file."""
    file.spec_id = spec
    return file


def to_json(metadata: TableMetadata, file: DataFile) -> dict[str, Any]:
    """Return a description of a data file for its commit."""
    return {
        "path": file.file_path,
        "format": file.file_format.value,
        "rows": file.record_count,
        "bytes": file.file_size_in_bytes,
        "schema": metadata.current_schema_id,
        "spec": file.spec_id,
        "partition": [
            None if value is None else b64encode(to_bytes(kind, value)).decode()
            for kind, value in zip(_partition(metadata, file.spec_id), _values(file.partition), strict=True)
        ],
        "offsets": file.split_offsets,
        **{name: getattr(file, name) for name in COUNTS},
        **{
            name: {id: b64encode(bound).decode() for id, bound in (getattr(file, name) or {}).items()}
            for name in BOUNDS
        },
    }


def from_json(metadata: TableMetadata, described: Mapping[str, Any]) -> DataFile:
    """Return the data file that ``to_json`` described."""
    kinds = _partition(metadata, described["spec"])
    values = [
        None if text is None else from_bytes(kind, b64decode(text))
        for kind, text in zip(kinds, described["partition"], strict=True)
    ]
    counts: dict[str, Any] = {
        name: {int(id): count for id, count in (described[name] or {}).items()} for name in COUNTS
    }
    bounds: dict[str, Any] = {
        name: {int(id): b64decode(bound) for id, bound in described[name].items()} for name in BOUNDS
    }
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=described["path"],
        file_format=FileFormat(described["format"]),
        partition=Record(*values),
        record_count=described["rows"],
        file_size_in_bytes=described["bytes"],
        split_offsets=described["offsets"],
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **counts,
        **bounds,
    )
    return _of_spec(file, described["spec"])


def _partition(metadata: TableMetadata, spec: int) -> list[PrimitiveType]:
    """Return the types of the values by which a spec partitions the table."""
    fields = metadata.specs()[spec].partition_type(metadata.schema()).fields
    return [field.field_type for field in fields if isinstance(field.field_type, PrimitiveType)]


def _values(record: Record) -> list[Any]:
    return [record[index] for index in range(len(record))]
