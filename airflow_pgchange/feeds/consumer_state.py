"""Asking how far one consumer is, how far behind, and what it has in work."""

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
    """The lag of one feed. A consumer that has not begun is behind by everything there is."""
    at = ask(progress_at(feed, results, source), feed.position())
    return Lag(**ask(source, feed.lag(at or NOWHERE, upto)))


def position(results: psycopg.Connection[Any], feed: Feed) -> dict[str, Any]:
    """The consumer's progress as the feed wrote it; raises UnknownConsumer."""
    found: dict[str, Any] | None = ask(results, feed.position())
    if found is None:
        raise UnknownConsumer(
            f"{feed.name} has no progress here: `airflow pgchange status` lists the consumers"
        )
    return found


def in_work(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed
) -> dict[str, Any] | None:
    """The batch that was claimed and not acked, as its row of ``claim``; None where there is none. Raises
    UnknownConsumer."""
    batch: dict[str, Any] | None = ask(source, feed.in_work(position(results, feed)))
    return batch
