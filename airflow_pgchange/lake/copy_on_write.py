"""Copy-on-write for all formats: new rows replace the rows of a table with the same keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from airflow_pgchange.lake import keys
from airflow_pgchange.lake.arrow import pa
from airflow_pgchange.lake.staged_files import StagedFiles

Old = TypeVar("Old")
New = TypeVar("New")


class DataFiles(Protocol[Old, New]):
    """The data files of a table at one version, and files that are not added to it yet."""

    def that_may_have(self, keys: pa.Table) -> Iterable[Old]:
        """Return the files of the table that may have one of the keys, by their bounds."""

    def rows(self, file: Old | New, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a file, in these columns or in all."""

    def gone(self, path: str) -> pa.Table:
        """Return the keys of rows to delete that an attempt has written into a file."""

    def written(self, rows: pa.Table) -> Iterator[New]:
        """Write rows into new files."""


def merged(
    table: DataFiles[Old, New], staged: StagedFiles, files: Sequence[New]
) -> tuple[list[Old], list[New]]:
    """Return the files to remove from the table and the files to add to it. ``files`` have the staged rows.

    Of each file that may have one of the keys, first only the key's columns are read. A file that has such rows is read
    into memory, and its other rows are written to a new file. Raises MergeRefused for keys that a mode does not allow.
    """
    new_rows = [table.rows(file, staged.key) for file in files]
    if new_rows:
        keys.check(staged.lake, pa.concat_tables(new_rows), once=staged.mode.behaviour.one_row_a_key)
    batch_keys = (
        pa.concat_tables([*new_rows, *map(table.gone, staged.gone)]).group_by(list(staged.key)).aggregate([])
    )
    removed: list[Old] = []
    added: list[New] = []
    for old in table.that_may_have(batch_keys) if batch_keys.num_rows else ():
        numbers = keys.numbers_of(table.rows(old, staged.key), batch_keys)
        if len(numbers):
            removed.append(old)
            added += table.written(keys.others(table.rows(old), numbers))
    # A mirror has a row as often as the batch has changes of it. The first row of each key stays.
    for new, later in zip(files, keys.later_in_each(new_rows), strict=True):
        added += table.written(keys.others(table.rows(new), later)) if len(later) else [new]
    return removed, added
