"""Statistics of a data file for the log of a Delta table. Readers use them to skip files."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

COLUMNS = 32
"""The number of columns with statistics: Delta's default of ``delta.dataSkippingNumIndexedCols``."""
CHARACTERS = 32
"""The number of characters in the bound of a text."""
MILLISECOND = timedelta(milliseconds=1)


def of(rows: pa.Table) -> str:
    """Return the number of rows, and for the first columns the bounds and the number of nulls, as JSON.

    A file is always read if a column has no bounds. So bounds are left out for decimals, because readers may round
    them, and for floats, because NaN is outside of all bounds.
    """
    names = [field.name for field in rows.schema if not pa.types.is_nested(field.type)][:COLUMNS]
    bounds = {name: _bounds(rows.column(name)) for name in names}
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": {name: low for name, (low, _) in bounds.items() if low is not None},
            "maxValues": {name: high for name, (_, high) in bounds.items() if high is not None},
            "nullCount": {name: rows.column(name).null_count for name in names},
        }
    )


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any]:
    kind = column.type
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    ):
        return None, None
    bounds = pc.min_max(column)
    try:
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        return (None, None) if low is None else (_lower(low), _upper(high))
    except (OverflowError, ValueError):  # Dates and times outside of the years from 1 to 9999.
        return None, None


def _lower(value: Any) -> Any:
    if isinstance(value, str):
        return value[:CHARACTERS]
    if isinstance(value, datetime):
        return _instant(value - timedelta(microseconds=value.microsecond % 1000))
    return value.isoformat() if isinstance(value, date) else value


def _upper(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= CHARACTERS else None
    if isinstance(value, datetime):
        beyond = value.microsecond % 1000
        return _instant(value - timedelta(microseconds=beyond) + (MILLISECOND if beyond else timedelta()))
    return value.isoformat() if isinstance(value, date) else value


def _instant(value: datetime) -> str:
    """Return a time as text in milliseconds, Delta's unit for bounds of times."""
    text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return text if value.tzinfo is None else f"{text}Z"
