"""The part of a consumer's status that is in the database of the changes, if its progress is in another database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import psycopg

from airflow_pgchange.errors import (
    HistoryTrimmed,
    SourceLostTail,
    SourceRestored,
    UnknownBranch,
    UnknownConsumer,
)
from airflow_pgchange.feeds.batch import whole_of
from airflow_pgchange.feeds.consumer_state import in_work, lag
from airflow_pgchange.feeds.feed import Feed

Connection = psycopg.Connection[Any]
LAG = {
    "ready": "ready",
    "ready_exact": "ready_exact",
    "oldest_seconds": "ready_age",
    "waiting": "waiting",
    "faults": "faults",
}
IN_WORK = {"batch_id": "id", "attempt": "attempt", "error": "error"}


def lease_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the owner and the end of the lease of a batch in work."""
    return {
        "leased_by": batch["leased_by"],
        "leased_until": datetime.fromisoformat(batch["leased_until"]),
    }


def elsewhere(results: Connection, source: Connection, feed: Feed) -> dict[str, Any]:
    """Return the lag and the batch in work of a consumer. ``ready`` is exact up to 1,000.

    If a person must decide first, the lag is None and ``held_back_by`` has the reason.
    """
    try:
        current = lag(results, source, feed, 1000)
    except (HistoryTrimmed, SourceLostTail, SourceRestored, UnknownBranch, UnknownConsumer) as error:
        return {**dict.fromkeys(LAG), "held_back_by": str(error)}
    batch = in_work(results, source, feed) or {}
    leased = {"at_work": True, **lease_of(batch)} if "leased_until" in batch else {}
    work = {name: batch.get(of) for name, of in IN_WORK.items()} | {"part_of": whole_of(batch)}
    return {name: getattr(current, of) for name, of in LAG.items()} | work | leased
