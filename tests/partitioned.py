"""A partitioned table that gets a new partition, for tests of existing rows."""

from __future__ import annotations

from typing import Any

import psycopg


def come(item: psycopg.Connection[Any], rows: str | None = "(11), (12)") -> None:
    """Attach a table as a partition, with rows or without."""
    if rows:
        item.execute(f"insert into high (id) values {rows}")
    item.execute("alter table item attach partition high for values from (10) to (20)")
