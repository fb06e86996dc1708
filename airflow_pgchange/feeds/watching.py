"""Asking for the lag of many feeds in one round trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from airflow_pgchange.feeds.asking import ask, ask_all
from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.errors import UnknownConsumer
from airflow_pgchange.feeds.feed import Feed

NOWHERE: dict[str, Any] = {}
"""The position of a consumer that has not begun: everything there ever was is before it."""


async def lags(
    results: psycopg.AsyncConnection[Any],
    source: psycopg.AsyncConnection[Any],
    wanted: Sequence[tuple[Feed, int]],
) -> list[Lag]:
    """The lag of each feed, counted exactly up to its number; two round trips however many feeds there are."""
    positions = await ask_all(results, [feed.position() for feed, _ in wanted])
    queries = [feed.lag(at or NOWHERE, upto) for (feed, upto), at in zip(wanted, positions, strict=True)]
    return [Lag.from_row(row) for row in await ask_all(source, queries)]


async def locked(results: psycopg.AsyncConnection[Any], feeds: Sequence[Feed]) -> list[bool]:
    """Whether a consumer is at work on each feed, without taking its lock."""
    return [bool(held) for held in await ask_all(results, [feed.locked() for feed in feeds])]


def lag(results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed, upto: int = 1) -> Lag:
    """The lag of one feed. A consumer that has not begun is behind by everything there is."""
    at = ask(results, feed.position())
    return Lag.from_row(ask(source, feed.lag(at or NOWHERE, upto)))


def position(results: psycopg.Connection[Any], feed: Feed) -> dict[str, Any]:
    """The consumer's progress as the feed wrote it; raises UnknownConsumer."""
    found: dict[str, Any] | None = ask(results, feed.position())
    if found is None:
        raise UnknownConsumer(
            f"{feed.name} has no progress here: `airflow pgchange status` lists the consumers"
        )
    return found
