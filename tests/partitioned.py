"""A table with partitions, to which another comes, for the tests of what was there before."""

from __future__ import annotations

from typing import Any

import psycopg


def come(item: psycopg.Connection[Any], rows: str | None = "(11), (12)") -> None:
    """A table becomes a partition, with rows or without."""
    if rows:
        item.execute(f"insert into high (id) values {rows}")
    item.execute("alter table item attach partition high for values from (10) to (20)")
