"""Rows for a table of a lake, as record batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.lake.arrow import pa, pc
from airflow_pgchange.lake.formats import FileWriter
from airflow_pgchange.lake.staged_files import Files
from airflow_pgchange.results.staging import TOUCHED

TARGET_BYTES = 128 * 1024 * 1024
"""The number of bytes of Arrow that are gathered in memory for a file. A partitioned table gets at least one file for
each of its partitions in these bytes."""

Rows: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch]


def batches_of(rows: Rows) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema of rows, and the rows as batches.

    Raises MergeRefused if there is no batch, and InvalidArgument if the rows are not Arrow data.
    """
    if isinstance(rows, pa.Table):
        return rows.schema, iter(rows.to_batches())
    if isinstance(rows, pa.RecordBatch):
        return rows.schema, iter([rows])
    if isinstance(rows, pa.RecordBatchReader):
        return rows.schema, iter(rows)
    batches: Iterator[object] = iter(rows)
    first = next(batches, None)
    if first is None:
        raise MergeRefused(
            "no record batch was given, so the columns are unknown: pass an empty record batch, or the table "
            "pa.Table.from_pylist([], schema=...)"
        )
    if not isinstance(first, pa.RecordBatch):
        raise InvalidArgument(
            f"the rows are a {type(rows).__name__} of {type(first).__name__}: give an Arrow table, such as "
            "pa.Table.from_pylist(rows, schema=...) or pa.Table.from_pandas(frame, schema=...), or record batches"
        )
    return first.schema, chain([first], batches)


def write_marked(writer: FileWriter, key: tuple[str, ...], batches: Iterable[pa.RecordBatch]) -> Files:
    """Write rows into files of the table of ``writer``.

    If the batches have the column ``TOUCHED``, rows in which it is true are only keys of rows to delete.
    """
    gone: list[pa.RecordBatch] = []
    return writer.write(_rows_to_write(batches, key, gone), gone)


def gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Return batches with rows in groups that are large enough for a file."""
    together: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            together.append(batch)
            size += _size(batch)
        if size >= TARGET_BYTES:
            yield together
            together, size = [], 0
    if together:
        yield together


def _size(batch: pa.RecordBatch) -> int:
    try:
        return int(batch.nbytes)
    except pa.ArrowTypeError:
        # Older versions of Arrow cannot compute the size of views of text. Count whole buffers instead.
        return int(batch.get_total_buffer_size())


def normalised(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the same values in the types of ``normalised_schema``."""
    return batch.cast(normalised_schema(batch.schema))


def normalised_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with UTC as the zone of instants, which is the only zone of lake tables, and without views.

    PyIceberg asks for the size of rows, which Arrow 18 cannot compute for views of text or bytes.
    """
    return pa.schema([field.with_type(_normalised(field.type)) for field in schema])


def _normalised(kind: pa.DataType) -> pa.DataType:
    if getattr(kind, "tz", None):
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _rows_to_write(
    batches: Iterable[pa.RecordBatch], key: tuple[str, ...], gone: list[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows to write, and add the keys of rows to delete to ``gone``."""
    for batch in batches:
        if TOUCHED not in batch.schema.names:
            yield batch
            continue
        names = [name for name in batch.schema.names if name != TOUCHED]
        is_gone = pc.fill_null(batch.column(TOUCHED), False)
        if keys := batch.filter(is_gone).select(list(key)):
            gone.append(keys)
        yield batch.filter(pc.invert(is_gone)).select(names)
