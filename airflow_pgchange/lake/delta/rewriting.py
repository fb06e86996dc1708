"""Copy-on-write: the data files of a Delta table without the rows of some keys."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake.delta import data_files
from airflow_pgchange.lake.delta.data_files import Layout
from airflow_pgchange.lake.keys import later_in_each, may_have, numbers_of, others

PLAIN = "!$&'()+,-./:;=@_~"
"""Besides letters and digits, the characters that ``deltalake`` writes into its log as they are."""
BOUNDED = (int, str, date)
"""The Python types of values whose bounds are exact, or longer than all values of a file."""


@dataclass(frozen=True)
class Old:
    """A data file of the table. ``path`` is the path as the log has it.

    ``lower`` and ``upper`` are the bounds of a column, None if they are not known or not exact.
    """

    path: str
    partition: dict[str, pa.Scalar]
    lower: Any
    upper: Any


def without(table: DeltaTable, layout: Layout, keys: pa.Table) -> Iterator[AddAction | RemoveAction]:
    """Write the rows that the keys do not name into new files, for each data file that has rows of the keys.

    ``keys`` has the columns of the key. Of each file that may have such rows the columns of the key are read. A file that
    has some is read as a whole, in memory, and written anew.
    """
    wanted = keys.group_by(keys.column_names).aggregate([])
    values = sorted(wanted.column(0).unique().to_pylist())
    for old in _files(table, layout, wanted.column_names[0]):
        if not may_have(values, old.lower, old.upper):
            continue
        path = unquote(old.path)
        if urlsplit(path).scheme or path.startswith("/"):
            raise MergeRefused(
                f"{layout.location}: the table has the file {path}, which is not in its own location, as after a shallow "
                "clone: only append to it, or copy it as a whole"
            )
        numbers = numbers_of(data_files.rows_of(layout, path, old.partition, wanted.column_names), wanted)
        if not len(numbers):
            continue
        if quote(path, safe=PLAIN) != old.path:
            raise MergeRefused(
                f"{layout.location}: the log has the file {old.path!r} by a name that deltalake writes otherwise, so it "
                "could not be removed: rewrite the table with OPTIMIZE or another tool"
            )
        left = others(data_files.rows_of(layout, path, old.partition), numbers)
        yield RemoveAction(path, data_change=True, deletion_timestamp=time.time_ns() // 1_000_000)
        yield from map(data_files.action, data_files.written(layout, left.to_batches()))


def keys_of(layout: Layout, described: Mapping[str, Any], key: tuple[str, ...]) -> pa.Table:
    """Return the keys of the rows of a file that was written for this commit."""
    return data_files.rows_of(
        layout, described["path"], data_files.partition_of(layout, described), list(key)
    )


def first_rows(
    layout: Layout, files: Sequence[Mapping[str, Any]], kept: Sequence[pa.Table]
) -> Iterator[Mapping[str, Any]]:
    """Return files with the first row of each key, given the keys of each file.

    A mirror has a row as often as the batch has changes of it. Only files with later rows are written anew.
    """
    for described, later in zip(files, later_in_each(kept), strict=True):
        if not len(later):
            yield described
        else:
            rows = data_files.rows_of(layout, described["path"], data_files.partition_of(layout, described))
            yield from data_files.written(layout, others(rows, later).to_batches())


def _files(table: DeltaTable, layout: Layout, name: str) -> Iterator[Old]:
    """The table's data files, with the bounds of a column."""
    found = pa.table(table.get_add_actions(flatten=True))
    # A column named "a.b" has no bounds here, because a field b of a column a may have the same name.
    bounds = [
        found.column(bound).to_pylist() if bound in found.column_names and "." not in name else None
        for bound in (f"min.{name}", f"max.{name}")
    ]
    for number in range(found.num_rows):
        partition = {
            column: found.column(f"partition.{column}")[number].cast(layout.schema.field(column).type)
            for column in layout.partitioning
        }
        if name in partition:
            lower = upper = partition[name].as_py()
        else:
            lower, upper = (None if values is None else values[number] for values in bounds)
        # Other writers cut bounds of times to milliseconds, so the upper bound can be below the last time of the file.
        bounded = type(lower) in BOUNDED
        path = found.column("path")[number].as_py()
        yield Old(path, partition, lower if bounded else None, upper if bounded else None)
