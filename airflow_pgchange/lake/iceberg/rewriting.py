"""Copy-on-write: the data files of an Iceberg table without the rows of some keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.types import IntegerType, LongType, StringType

from airflow_pgchange.lake.iceberg import data_files
from airflow_pgchange.lake.keys import later_in_each, may_have, numbers_of, others
from airflow_pgchange.lake.names import Attempt


@dataclass(frozen=True)
class Rewritten:
    """A data file that has rows of the keys, and the files with its other rows, which take its place."""

    file: DataFile
    left: tuple[DataFile, ...]


def without(table: Table, attempt: Attempt, keys: pa.Table) -> Iterator[Rewritten]:
    """Write the rows that the keys do not name into new files, for each data file that has rows of the keys.

    ``keys`` has the columns of the key. Of each file that may have such rows the columns of the key are read. A file that
    has some is read as a whole, in memory, and written anew.
    """
    schema = table.schema()
    wanted = _cast(keys, schema).group_by(keys.column_names).aggregate([])
    first = sorted(wanted.column(0).unique().to_pylist()) if wanted.num_rows else []
    for task in table.scan().plan_files():
        if first and _may_have(task.file, schema, wanted.column_names[0], first):
            numbers = numbers_of(rows_of(table, [task], wanted.column_names), wanted)
            if len(numbers):
                left = others(rows_of(table, [task]), numbers)
                files = data_files.written(table.metadata, table.io, attempt, left.to_batches())
                yield Rewritten(task.file, tuple(files))


def first_rows(
    table: Table, attempt: Attempt, files: Sequence[DataFile], kept: Sequence[pa.Table]
) -> Iterator[DataFile]:
    """Return files with the first row of each key, given the keys of each file.

    A mirror has a row as often as the batch has changes of it. Only files with later rows are written anew.
    """
    for file, later in zip(files, later_in_each(kept), strict=True):
        if not len(later):
            yield file
        else:
            left = others(rows_of(table, [FileScanTask(file)]), later)
            yield from data_files.written(table.metadata, table.io, attempt, left.to_batches())


def rows_of(table: Table, tasks: Iterable[FileScanTask], columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of data files, without those that delete files name."""
    schema = table.schema() if columns is None else table.schema().select(*columns)
    rows = ArrowScan(table.metadata, table.io, schema, AlwaysTrue()).to_table(list(tasks))
    return rows if columns is None else comparable(rows.select(columns))


def comparable(keys: pa.Table) -> pa.Table:
    """The same keys in types that Arrow compares: a uuid as its bytes."""
    return keys.cast(_comparable(keys.schema))


def _cast(keys: pa.Table, schema: Schema) -> pa.Table:
    """The keys in the types in which those of the table's own rows are read."""
    kinds = schema.select(*keys.column_names).as_arrow()
    return keys.cast(_comparable(pa.schema([kinds.field(name) for name in keys.column_names])))


def _comparable(schema: pa.Schema) -> pa.Schema:
    return pa.schema(
        [
            field.with_type(field.type.storage_type)
            if isinstance(field.type, pa.BaseExtensionType)
            else field
            for field in schema
        ]
    )


def _may_have(file: DataFile, schema: Schema, name: str, values: list[Any]) -> bool:
    """Whether the bounds of a file leave room for one of the sorted values of the first column of the key."""
    field = schema.find_field(name)
    kind = field.field_type
    lower, upper = ((bounds or {}).get(field.field_id) for bounds in (file.lower_bounds, file.upper_bounds))
    if lower is None or upper is None or not isinstance(kind, IntegerType | LongType | StringType):
        return True
    # A bound of a column that has become a long has four bytes. PyIceberg 0.11 takes eight only.
    value = (
        bytes.decode
        if isinstance(kind, StringType)
        else partial(int.from_bytes, byteorder="little", signed=True)
    )
    return may_have(values, value(lower), value(upper))
