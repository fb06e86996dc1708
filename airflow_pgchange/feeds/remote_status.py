"""What only the database of the changes knows of a consumer whose progress is in another."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.feeds.errors import (
    HistoryTrimmed,
    SourceLostTail,
    SourceRestored,
    UnknownBranch,
    UnknownConsumer,
)
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.lag import lag, position
from airflow_pgchange.feeds.queries import ask

Connection = psycopg.Connection[Any]
IN_WORK = {"batch_id": "id", "attempt": "attempt", "error": "error"}


def elsewhere(results: Connection, source: Connection, feed: Feed) -> dict[str, Any]:
    """Lag and batch in work. ``ready`` is exact up to 1,000; ``held_back_by`` says where a person must decide first, and
    then the lag is None."""
    figures, held_back_by = lag_or_why_not(results, source, feed)
    if held_back_by is not None:
        return {**figures, "held_back_by": held_back_by}
    batch = in_work(results, source, feed) or {}
    return {**figures, **{name: batch.get(key) for name, key in IN_WORK.items()}}


def lag_or_why_not(results: Connection, source: Connection, feed: Feed) -> tuple[dict[str, Any], str | None]:
    """The lag, ``ready`` exact up to 1,000; or None for each of its figures, and why a person must decide first."""
    try:
        found = lag(results, source, feed, 1000)
    except (HistoryTrimmed, SourceLostTail, SourceRestored, UnknownBranch, UnknownConsumer) as error:
        return dict.fromkeys(("ready", "ready_exact", "oldest_seconds", "waiting", "faults")), str(error)
    return {
        "ready": found.ready,
        "ready_exact": found.ready_exact,
        "oldest_seconds": found.ready_age,
        "waiting": found.waiting,
        "faults": found.faults,
    }, None


def in_work(results: Connection, source: Connection, feed: Feed) -> dict[str, Any] | None:
    """The batch that was claimed and not acked, as its row of ``claim``; None where there is none."""
    batch: dict[str, Any] | None = ask(source, feed.in_work(position(results, feed)))
    return batch
