"""A table with rows or without rows that becomes a partition of another table."""

from __future__ import annotations

from typing import Any

import psycopg


def come(item: psycopg.Connection[Any], rows: str | None = "(11), (12)") -> None:
    """Attach a new table with this number of rows to the partitioned table."""
    if rows:
        item.execute(f"insert into high (id) values {rows}")
    item.execute("alter table item attach partition high for values from (10) to (20)")
