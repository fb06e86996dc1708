"""Copy-on-write: the data files of an Iceberg table without the rows of some keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.types import IntegerType, LongType, StringType

from airflow_pgchange.lake.iceberg import data_files
from airflow_pgchange.lake.names import Attempt

PLACE = "pgchange_place"
"""The column with the number of a row in its file."""


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
            named = _places(rows_of(table, [task], wanted.column_names), wanted)
            if named:
                left = _others(rows_of(table, [task]), named)
                files = data_files.written(table.metadata, table.io, attempt, left.to_batches())
                yield Rewritten(task.file, tuple(files))


def rows_of(table: Table, tasks: Iterable[FileScanTask], columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of data files, without those that delete files name."""
    schema = table.schema() if columns is None else table.schema().select(*columns)
    rows = ArrowScan(table.metadata, table.io, schema, AlwaysTrue()).to_table(list(tasks))
    return rows if columns is None else rows.select(columns)


def _cast(keys: pa.Table, schema: Schema) -> pa.Table:
    """The keys in the types in which the table's own rows are read."""
    kinds = schema.select(*keys.column_names).as_arrow()
    return keys.cast(pa.schema([kinds.field(name) for name in keys.column_names]))


def _may_have(file: DataFile, schema: Schema, name: str, values: list[Any]) -> bool:
    """Whether the bounds of a file leave room for one of the sorted values of the first column of the key."""
    field = schema.find_field(name)
    kind = field.field_type
    lower, upper = ((bounds or {}).get(field.field_id) for bounds in (file.lower_bounds, file.upper_bounds))
    if lower is None or upper is None or not isinstance(kind, IntegerType | LongType | StringType):
        return True
    at = bisect_left(values, from_bytes(kind, lower))
    return at < len(values) and values[at] <= from_bytes(kind, upper)


def _places(found: pa.Table, wanted: pa.Table) -> list[int]:
    """The numbers of the rows whose keys are wanted."""
    numbered = found.append_column(PLACE, pa.array(range(found.num_rows), pa.int64()))
    joined = numbered.join(wanted.cast(found.schema), keys=wanted.column_names, join_type="left semi")
    places: list[int] = joined.column(PLACE).to_pylist()
    return places


def _others(rows: pa.Table, places: list[int]) -> pa.Table:
    numbers = pa.array(range(rows.num_rows), pa.int64())
    return rows.filter(pc.invert(pc.is_in(numbers, pa.array(places, pa.int64()))))
