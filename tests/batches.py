"""A batch of any feed, done as a consumer does it."""

from __future__ import annotations

from typing import Any

from airflow_pgchange.feeds import Change, ConsumerTransaction
from airflow_pgchange.feeds.feed import Feed


def taken(
    feed: Feed, results: str, source: str | None = None, limit: int = 1000, write: Any = None
) -> list[Change]:
    """The changes of the next batch, which is acked with what ``write`` writes; none where nothing is ready."""
    with ConsumerTransaction(feed, results, source) as consumer:
        if consumer.claim(limit) is None:
            return []
        changes = list(consumer.changes())
        consumer.ack(write)
    return changes


def drained(feed: Feed, results: str, source: str | None = None, limit: int = 1000) -> list[Change]:
    """The changes of all batches that are ready, each acked."""
    found: list[Change] = []
    while changes := taken(feed, results, source, limit):
        found += changes
    return found
