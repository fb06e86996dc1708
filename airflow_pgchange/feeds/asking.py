"""Queries that return one row with one column, many in a round trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.errors import translated


async def ask_all(connection: psycopg.AsyncConnection[Any], queries: Sequence[sql.Composed]) -> list[Any]:
    """The value of each query, None where it returns no row; one round trip, and all fail if one does."""
    if not queries:
        return []
    with translated():
        cursor = await connection.execute(sql.SQL("; ").join(queries))
        values = []
        for _ in queries:
            row = await cursor.fetchone()
            values.append(None if row is None else row[0])
            cursor.nextset()
    return values


def ask(connection: psycopg.Connection[Any], query: sql.SQL | sql.Composed) -> Any:
    """The value of one query, None where it returns no row."""
    with translated():
        row = connection.execute(query).fetchone()
    return None if row is None else row[0]
