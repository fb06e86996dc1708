"""Asking for the lag of many feeds in one round trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.errors import UnknownConsumer, translated
from airflow_pgchange.feeds.feed import Feed

NOWHERE: dict[str, Any] = {}
"""The position of a consumer that has not begun: everything there ever was is before it."""


async def lags(
    results: psycopg.AsyncConnection[Any],
    source: psycopg.AsyncConnection[Any],
    wanted: Sequence[tuple[Feed, int]],
) -> list[Lag]:
    """The lag of each feed, counted exactly up to its number; two pipelined round trips however many feeds there are."""
    with translated():
        positions = await _values(results, [feed.position() for feed, _ in wanted])
        rows = await _values(
            source,
            [feed.lag(at or NOWHERE, upto) for (feed, upto), at in zip(wanted, positions, strict=True)],
        )
    return [Lag.from_row(row) for row in rows]


async def locked(results: psycopg.AsyncConnection[Any], feeds: Sequence[Feed]) -> list[bool]:
    """Whether a consumer is at work on each feed, without taking its lock."""
    with translated():
        return [bool(held) for held in await _values(results, [feed.locked() for feed in feeds])]


def lag(results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed, upto: int = 1) -> Lag:
    """The lag of one feed. A consumer that has not begun is behind by everything there is."""
    with translated():
        position = _value(results, feed.position())
        return Lag.from_row(_value(source, feed.lag(position or NOWHERE, upto)))


def position(results: psycopg.Connection[Any], feed: Feed) -> dict[str, Any]:
    """The consumer's progress as the feed wrote it; raises UnknownConsumer."""
    with translated():
        found: dict[str, Any] | None = _value(results, feed.position())
    if found is None:
        raise UnknownConsumer(
            f"{feed.name} has no progress here: `airflow pgchange status` lists the consumers"
        )
    return found


async def _values(connection: psycopg.AsyncConnection[Any], queries: Sequence[sql.Composed]) -> list[Any]:
    if not queries:
        return []
    together = sql.SQL("; ").join(queries)
    cursor = await connection.execute(together)
    values = []
    for _ in queries:
        row = await cursor.fetchone()
        values.append(None if row is None else row[0])
        cursor.nextset()
    return values


def _value(connection: psycopg.Connection[Any], query: sql.Composed) -> Any:
    row = connection.execute(query).fetchone()
    return None if row is None else row[0]
