"""The data files of a Delta table, for copy-on-write."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake.delta import data_files, object_store
from airflow_pgchange.lake.delta.data_files import Layout
from airflow_pgchange.lake.keys import may_have

PLAIN = "!$&'()+,-./:;=@_~"
"""The characters besides letters and digits that ``deltalake`` does not escape in its log."""
BOUNDED = (int, str, date)
"""The Python types whose bounds can be trusted: no value of a file is outside of them."""


@dataclass(frozen=True)
class Old:
    """A data file of the table. ``logged`` is its path as the log has it."""

    logged: str
    partition: dict[str, pa.Scalar]

    @property
    def path(self) -> str:
        return unquote(self.logged)


@dataclass(frozen=True)
class New:
    """A data file that was written for a commit."""

    described: Mapping[str, Any]
    partition: dict[str, pa.Scalar]

    @property
    def path(self) -> str:
        return str(self.described["path"])


@dataclass(frozen=True)
class DataFiles:
    """The data files of a table, and new files of an attempt."""

    table: DeltaTable
    layout: Layout

    def that_may_have(self, keys: pa.Table) -> Iterator[Old]:
        """Return the files of the table that may have one of the keys, by their bounds.

        Raises MergeRefused if such a file is not in the location of the table.
        """
        values = sorted(keys.column(0).unique().to_pylist())
        for old, lower, upper in self._bounded(keys.column_names[0]):
            if not may_have(values, lower, upper):
                continue
            if urlsplit(old.path).scheme or old.path.startswith("/"):
                raise MergeRefused(
                    f"{self.layout.location}: the table has the file {old.path}, which is not in its own location, as "
                    f"after a shallow clone. Only append to the table, or copy it as a whole"
                )
            yield old

    def rows(self, file: Old | New, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a file."""
        return data_files.rows_of(self.layout, file.path, file.partition, columns)

    def gone(self, path: str) -> pa.Table:
        """Return the keys of rows to delete."""
        with object_store.files(self.layout.location, self.layout.options).open_input_file(path) as file:
            return pq.read_table(file)

    def written(self, rows: pa.Table) -> Iterator[New]:
        """Write rows into new files."""
        return map(self.new, data_files.written(self.layout, rows.to_batches()))

    def new(self, described: Mapping[str, Any]) -> New:
        """Return a new file by its description."""
        return New(described, data_files.partition_of(self.layout, described))

    def removal(self, old: Old) -> RemoveAction:
        """Return the action that removes a file from the table."""
        if quote(old.path, safe=PLAIN) != old.logged:
            raise MergeRefused(
                f"{self.layout.location}: the file {old.logged!r} cannot be removed, because deltalake would escape "
                f"its name in another way. Rewrite the table with OPTIMIZE or another tool"
            )
        return RemoveAction(old.path, data_change=True, deletion_timestamp=time.time_ns() // 1_000_000)

    def _bounded(self, name: str) -> Iterator[tuple[Old, Any, Any]]:
        """Yield the files of the table, each with the bounds of a column. An unknown or inexact bound is None."""
        files = pa.table(self.table.get_add_actions(flatten=True))
        # A column named "a.b" has no bounds here, because a field b of a column a may have the same name.
        bounds = [
            files.column(bound).to_pylist() if bound in files.column_names and "." not in name else None
            for bound in (f"min.{name}", f"max.{name}")
        ]
        for number in range(files.num_rows):
            partition = {
                column: files.column(f"partition.{column}")[number].cast(
                    self.layout.schema.field(column).type
                )
                for column in self.layout.partitioning
            }
            old = Old(files.column("path")[number].as_py(), partition)
            if name in partition:
                lower = upper = partition[name].as_py()
            else:
                lower, upper = (None if values is None else values[number] for values in bounds)
            # Other writers cut bounds of times to milliseconds, so the upper bound can be below the last time of a file.
            yield (old, lower, upper) if type(lower) in BOUNDED else (old, None, None)
