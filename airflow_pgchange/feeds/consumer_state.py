"""Read the state of one consumer: its lag, its position, and its batch in work."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.errors import UnknownConsumer
from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.feed import NOWHERE, Feed, Watched, progress_at
from airflow_pgchange.feeds.queries import ask


def lag(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Watched, upto: int = 1
) -> Lag:
    """Return the lag of a consumer, exact up to ``upto``. For a consumer that has not begun, all changes count."""
    at = ask(progress_at(feed, results, source), feed.position())
    return Lag(**ask(source, feed.lag(at or NOWHERE, upto)))


def position(results: psycopg.Connection[Any], feed: Feed) -> dict[str, Any]:
    """Return the position of a consumer. Raises UnknownConsumer."""
    stored: dict[str, Any] | None = ask(results, feed.position())
    if stored is None:
        raise UnknownConsumer(
            f"{feed.name} has no progress here: `airflow-pgchange status` lists the consumers"
        )
    return stored


def in_work(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed
) -> dict[str, Any] | None:
    """Return the batch that was claimed and not acked, as the claim returned it, or None. Raises UnknownConsumer."""
    batch: dict[str, Any] | None = ask(source, feed.in_work(position(results, feed)))
    return batch
