"""Consumers that DAGs name but that have not claimed a batch yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import psycopg

from airflow_pgchange.errors import PgChangeError, ServerUnavailable
from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.feed import BEGINNING, Feed, Watched, progress_at
from airflow_pgchange.feeds.feed_kinds import identity
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.start_position import has_moved, outlook, start_text

Connection = psycopg.Connection[Any]
Key = tuple[str, str]
Row = dict[str, Any]
OF_LAG = {
    "ready": "ready",
    "ready_exact": "ready_exact",
    "oldest_seconds": "ready_age",
    "waiting": "waiting",
    "faults": "faults",
}
OTHERS = [
    "version",
    "batch_id",
    "attempt",
    "error",
    "claimed_at",
    "updated_at",
    "held_back_by",
    "elsewhere",
    "part_of",
    "leased_by",
    "leased_until",
    "why",
]
"""The other columns of a row of ``status()``. They are None until the consumer is registered."""


class Named(Protocol):
    """The feed of a named consumer, and its start if it is new."""

    @property
    def feed(self) -> Watched: ...

    @property
    def start(self) -> str: ...


def with_new(
    results: Connection, source: Connection, rows: list[Row], named: Mapping[Key, Named]
) -> list[Row]:
    """Return the rows of ``status()`` with a column ``new``: the start of a named consumer that has not claimed a batch.

    Named consumers that are not registered get a row too, in which ``registered`` is false. A consumer whose feed does
    not exist gets no row; ``airflow-pgchange check`` reports it.
    """
    registered = {(row["kind"], row["consumer"]) for row in rows}
    complete = [row | {"new": _new(results, source, row, named), "registered": True} for row in rows]
    for key, consumer in named.items():
        if key not in registered and isinstance(consumer.feed, Feed):
            complete += _unregistered(results, source, consumer.feed, consumer.start)
    return complete


def _new(results: Connection, source: Connection, row: Row, named: Mapping[Key, Named]) -> str | None:
    consumer = named.get((row["kind"], row["consumer"]))
    if consumer is None or row["version"] != 0 or row["batch_id"] is not None or row["at_work"]:
        return None
    if isinstance(consumer.feed, Feed) and _has_moved(results, source, consumer.feed):
        return None
    lag = None
    if consumer.start == BEGINNING and row["ready"] is not None:
        lag = Lag(row["ready"], row["waiting"] or 0, row["ready_exact"] is not False)
    return f"new consumer, {start_text(consumer.start, lag)}"


def _has_moved(results: Connection, source: Connection, feed: Feed) -> bool:
    try:
        position = ask(progress_at(feed, results, source), feed.position())
    except ServerUnavailable:
        raise
    except (PgChangeError, psycopg.Error):
        return False
    return position is not None and has_moved(position)


def _unregistered(results: Connection, source: Connection, feed: Feed, start: str) -> list[Row]:
    try:
        new = outlook(results, source, feed, start)
    except ServerUnavailable:
        raise
    except (PgChangeError, psycopg.Error):
        return []
    if new is None:
        return []
    row: Row = {"kind": feed.kind, "consumer": feed.name, "feed": identity(feed), **dict.fromkeys(OTHERS)}
    row |= {column: getattr(new.lag, name, None) for column, name in OF_LAG.items()}
    return [row | {"at_work": False, "new": f"new consumer, {new}", "registered": False}]
