"""The data files of an Iceberg table, for copy-on-write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.types import IntegerType, LongType, StringType

from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.iceberg import data_files
from airflow_pgchange.lake.keys import may_have


@dataclass(frozen=True)
class DataFiles:
    """The data files of a table, and new files of an attempt. A file of the table comes with its delete files."""

    table: Table
    attempt: Attempt

    def that_may_have(self, keys: pa.Table) -> Iterator[FileScanTask]:
        """Return the files of the table that may have one of the keys, by their bounds."""
        schema, name = self.table.schema(), keys.column_names[0]
        values = sorted(keys.column(0).unique().to_pylist())
        return (task for task in self.table.scan().plan_files() if _may_have(task.file, schema, name, values))

    def rows(self, file: FileScanTask, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a file, without those that its delete files name."""
        schema = self.table.schema() if columns is None else self.table.schema().select(*columns)
        rows = ArrowScan(self.table.metadata, self.table.io, schema, AlwaysTrue()).to_table([file])
        return rows if columns is None else _comparable(rows.select(columns))

    def gone(self, path: str) -> pa.Table:
        """Return the keys of rows to delete, in the types of the table."""
        with self.table.io.new_input(path).open() as file:
            keys = pq.read_table(file)
        kinds = self.table.schema().select(*keys.column_names).as_arrow()
        return _comparable(keys).cast(_plain(kinds, keys.column_names))

    def written(self, rows: pa.Table) -> Iterator[FileScanTask]:
        """Write rows into new files."""
        files = data_files.written(self.table.metadata, self.table.io, self.attempt, rows.to_batches())
        return map(FileScanTask, files)


def _comparable(keys: pa.Table) -> pa.Table:
    """Return the same keys in types that Arrow can compare: a uuid as its bytes."""
    return keys.cast(_plain(keys.schema, keys.column_names))


def _plain(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    fields = map(schema.field, names)
    return pa.schema(
        [
            field.with_type(field.type.storage_type)
            if isinstance(field.type, pa.BaseExtensionType)
            else field
            for field in fields
        ]
    )


def _may_have(file: DataFile, schema: Schema, name: str, values: list[Any]) -> bool:
    """Whether a file may have one of the sorted values in the first column of the key, by its bounds."""
    field = schema.find_field(name)
    kind = field.field_type
    lower, upper = ((bounds or {}).get(field.field_id) for bounds in (file.lower_bounds, file.upper_bounds))
    if lower is None or upper is None or not isinstance(kind, IntegerType | LongType | StringType):
        return True
    # If a column has become a long, its old bounds have four bytes, but PyIceberg 0.11 accepts only eight.
    value = (
        bytes.decode
        if isinstance(kind, StringType)
        else partial(int.from_bytes, byteorder="little", signed=True)
    )
    return may_have(values, value(lower), value(upper))
