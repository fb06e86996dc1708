"""The error for rows that do not fit a table, in the same words for each format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake.tables import LakeTable


def refusal(lake: LakeTable, mismatches: Iterable[str]) -> MergeRefused:
    """Return the error that lists all mismatches."""
    return MergeRefused(
        f"{lake}: the rows do not fit the table: {'; '.join(mismatches)}: cast, add or drop columns of the rows, or "
        "change the table"
    )


def no_columns(names: Sequence[str], existing: Iterable[str]) -> str:
    """Say that a table with the columns ``existing`` lacks these columns, and how it gets them.

    ``evolve`` adds no column whose name differs in case alone.
    """
    by_lower = {name.lower(): name for name in existing}
    similar = [by_lower[name.lower()] for name in names if name.lower() in by_lower]
    remedy = f"but {', '.join(similar)}" if similar else "which evolve=True adds"
    return f"the table has no column {', '.join(names)}, {remedy}"


def another_type(name: str, rows: object, table: object) -> str:
    """Say that the column ``name`` has one type in the rows and another in the table."""
    return f"column {name} is of type {rows} in the rows and {table} in the table"


def missing(name: str) -> str:
    """Say that the rows lack a column that may not be NULL."""
    return f"column {name} is missing, and the table requires it"
