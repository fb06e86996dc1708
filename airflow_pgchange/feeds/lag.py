"""Asking how far one consumer is, and how far behind."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.errors import UnknownConsumer
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
