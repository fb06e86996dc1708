"""Queries that return one row with one column, many in a round trip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from airflow_pgchange.feeds.errors import translated

Query = LiteralString | sql.SQL | sql.Composed


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


def ask(
    connection: psycopg.Connection[Any], query: Query, values: Sequence[Any] | Mapping[str, Any] | None = None
) -> Any:
    """The value of one query, None where it returns no row."""
    found = rows(connection, query, values)
    return found[0][0] if found else None


def rows(
    connection: psycopg.Connection[Any], query: Query, values: Sequence[Any] | Mapping[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """What a query returns, as tuples: a connection of the user's may make dicts or objects of its rows."""
    with translated(), connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(query, values).fetchall()
