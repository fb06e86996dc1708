"""Data files of a Delta table: written by any process, and sent as JSON to the process that commits them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake.delta import object_store, statistics
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.keys import NUMBER, with_numbers
from airflow_pgchange.lake.rows import gathered

PARQUET = pyarrow.dataset.ParquetFileFormat(coerce_int96_timestamp_unit="us")
"""Spark writes times as INT96, which Arrow would read as nanoseconds: those end in the year 2262."""


@dataclass(frozen=True)
class Layout:
    """All that an attempt needs to read and write files of a table, in any process. ``options`` may have secrets.

    ``definition`` is a hash of everything that the table declares. Files are committed only to the same definition.
    """

    attempt: Attempt
    location: str
    options: Mapping[str, str] = field(repr=False)
    schema: pa.Schema
    partitioning: tuple[str, ...]
    definition: str


def new_path(layout: Layout, kind: str = "part") -> str:
    """Return the path of a new file. It contains the attempt that writes it."""
    return f"{kind}-{layout.attempt}_{uuid.uuid4()}.parquet"


def written(layout: Layout, batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """Write the rows into new data files of the table, each partition into files of its own, and describe the files.

    The rows are never all in memory. The files are not part of the table until a commit names them.
    """
    files = object_store.files(layout.location, layout.options)
    for together in gathered(batches):
        for values, rows in _divided(pa.Table.from_batches(together), layout.partitioning):
            path = new_path(layout)
            stored = rows.drop_columns(list(layout.partitioning))
            with files.open_output_stream(path) as file:
                pq.write_table(stored, file)
            yield {
                "path": path,
                "rows": rows.num_rows,
                "bytes": files.get_file_info(path).size,
                "partition": {name: as_text(layout, name, value) for name, value in values.items()},
                "statistics": statistics.of(stored),
                "definition": layout.definition,
            }


def action(described: Mapping[str, Any]) -> AddAction:
    """Return the action that adds a file to the table."""
    return AddAction(
        path=described["path"],
        size=described["bytes"],
        partition_values=described["partition"],
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=described["statistics"],
    )


def partition_of(layout: Layout, described: Mapping[str, Any]) -> dict[str, pa.Scalar]:
    """Return the values of the columns that partition the table, which are not in the file."""
    return {
        name: pa.scalar(text, pa.string()).cast(layout.schema.field(name).type)
        for name, text in described["partition"].items()
    }


def rows_of(
    layout: Layout, path: str, partition: Mapping[str, pa.Scalar], columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the rows of a file in the columns of the table. Columns that the file lacks are null."""
    conditions = [
        pyarrow.dataset.field(name) == value if value.is_valid else pyarrow.dataset.field(name).is_null()
        for name, value in partition.items()
    ]
    expression = pyarrow.dataset.scalar(True)
    for each in conditions:
        expression = expression & each
    fragment = PARQUET.make_fragment(
        path, object_store.files(layout.location, layout.options), partition_expression=expression
    )
    return fragment.to_table(schema=layout.schema, columns=list(columns or layout.schema.names))


def as_text(layout: Layout, name: str, value: Any) -> str | None:
    """Return the value of a column that partitions the table as Delta's log writes it."""
    if value == "":
        raise MergeRefused(
            f"{layout.location}: the column {name!r} partitions the table, and Delta reads an empty text there as NULL: "
            "write NULL or another text"
        )
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")
        return text if value.tzinfo is None else f"{text.replace(' ', 'T')}Z"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    return None if value is None else str(value)


def _divided(rows: pa.Table, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """Yield the rows of each partition, with the values of the partition's columns."""
    if not names:
        yield {}, rows
        return
    groups = with_numbers(rows.select(names)).group_by(list(names)).aggregate([(NUMBER, "list")])
    numbers = groups.column(f"{NUMBER}_list")
    for index, values in enumerate(groups.select(names).to_pylist()):
        yield values, rows.take(numbers[index].values)
