"""Keys of rows. By them a merge finds the rows of a table that it replaces or deletes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.lake.arrow import pa, pc
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.merge_modes import Mode

NUMBER = "pgchange_number"
"""The column with the number of a row."""


def check_mode(lake: LakeTable, rows: pa.Schema, key: tuple[str, ...], mode: Mode) -> None:
    """Raise MergeRefused if the mode is refused for tables of a lake, or needs a key that the rows do not have."""
    if mode.behaviour.sums:
        raise MergeRefused(
            f"{lake}: mode {mode} adds to rows, so the files of the table would be read and written again. Append the "
            f"sums of each batch and add them up in a query, or replace whole rows"
        )
    if not mode.behaviour.needs_key:
        return
    if not key:
        raise MergeRefused(f"{lake}: mode {mode} finds rows by their key: pass key=")
    if lacking := [name for name in key if name not in rows.names]:
        raise MergeRefused(
            f"{lake}: the key {lacking[0]!r} is not one of the columns {', '.join(rows.names)}"
        )


def unfit(lake: LakeTable, name: str, kind: object) -> MergeRefused:
    """Return the error for a column whose type cannot be part of a key."""
    return MergeRefused(
        f"{lake}: the column {name!r} is of type {kind}, which cannot be part of a key: choose another key"
    )


def check(lake: LakeTable, keys: pa.Table, *, once: bool) -> None:
    """Raise MergeRefused if a key has a NULL, or, with ``once``, if two rows have the same key."""
    if any(column.null_count for column in keys.columns):
        raise MergeRefused(f"{lake}: a key has a NULL: drop such rows before merging")
    if once and (twice := later_rows(keys)):
        named = ", ".join(f"{name}={value}" for name, value in keys.slice(twice[0], 1).to_pylist()[0].items())
        raise MergeRefused(
            f"{lake}: the key {named} was staged more than once, so it is not clear which row is right: use "
            f"dropDuplicates or an aggregate before merging"
        )


def of_gone(lake: LakeTable, gone: pa.Table, key: tuple[str, ...], mode: Mode) -> pa.Table:
    """Return the keys of rows to delete. Raises MergeRefused if they are not valid keys, and InvalidArgument if the
    mode deletes no rows."""
    if not mode.behaviour.deletes_touched:
        raise InvalidArgument(
            f"{lake}: mode {mode} deletes no rows that are gone: use mode mirror, or leave gone out"
        )
    if missing := [name for name in key if name not in gone.column_names]:
        raise MergeRefused(f"{lake}: the keys of rows that are gone lack the column {', '.join(missing)}")
    keys = gone.select(key)
    check(lake, keys, once=False)
    return keys


def later_rows(keys: pa.Table) -> list[int]:
    """Return the numbers of the rows whose key an earlier row has."""
    numbered = with_numbers(keys)
    first = numbered.group_by(keys.column_names).aggregate([(NUMBER, "min")]).column(f"{NUMBER}_min")
    later: list[int] = others(numbered, first).column(NUMBER).to_pylist()
    return later


def later_in_each(tables: Sequence[pa.Table]) -> Iterator[pa.Array]:
    """Return, for each of the tables, the numbers of its rows whose key an earlier row of any table has."""
    later = pa.array(later_rows(pa.concat_tables(tables)) if tables else [], pa.int64())
    begin = 0
    for keys in tables:
        end = begin + keys.num_rows
        yield pc.subtract(later.filter(pc.and_(pc.greater_equal(later, begin), pc.less(later, end))), begin)
        begin = end


def numbers_of(keys: pa.Table, searched: pa.Table) -> pa.ChunkedArray:
    """Return the numbers of the rows whose keys are wanted."""
    joined = with_numbers(keys).join(
        searched.cast(keys.schema), keys=searched.column_names, join_type="left semi"
    )
    return joined.column(NUMBER)


def may_have(values: Sequence[Any], lower: Any, upper: Any) -> bool:
    """Whether a file with these bounds may have one of the sorted values. An unknown bound is None."""
    if lower is None or upper is None:
        return bool(values)
    at = bisect_left(values, lower)
    return at < len(values) and values[at] <= upper


def others(rows: pa.Table, numbers: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the rows that do not have these numbers."""
    return rows.filter(pc.invert(pc.is_in(_numbers(rows), numbers)))


def with_numbers(rows: pa.Table) -> pa.Table:
    """Return the rows with their numbers in one more column."""
    return rows.append_column(NUMBER, _numbers(rows))


def _numbers(rows: pa.Table) -> pa.Array:
    return pa.array(range(rows.num_rows), pa.int64())
