"""Manual operations on consumers: skip a batch, repair, move, register and drop. Also trimming of processed history."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any

import psycopg

from airflow_pgchange.admin.steps import all_lines
from airflow_pgchange.errors import BatchNotFinished, ConsumerBusy, InvalidArgument, Leased
from airflow_pgchange.feeds import start_position
from airflow_pgchange.feeds.argument_checks import Bytes, Seconds, check_count, size, span
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.consumer_state import in_work, position
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.feed import BEGINNING, Feed, Movable, progress_at
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.start_position import Start
from airflow_pgchange.lake.tables import Delta

Connection = psycopg.Connection[Any]
Limits = tuple[timedelta | None, int | None, int | None]
"""How much history stays: its age, bytes and number of changes. None is no limit."""


def skip_batch(results: Connection, source: Connection, feed: Feed, reason: str) -> str:
    """Give up the consumer's batch in work: it becomes a dead letter with ``reason``. Return the batch's id.

    Raises BatchNotFinished if no batch is in work, and ConsumerBusy while the consumer is at work.
    """
    batch = _in_work(results, source, feed)
    ask(progress_at(feed, results, source), feed.skip(batch, reason))
    return str(batch["id"])


def repair_delta(results: Connection, source: Connection, feed: Feed, table: Delta) -> str:
    """Let a Delta table accept the batch in work, which it refuses. Return the batch's id.

    The table refuses a batch if it has another batch of the same number, or if it does not show whether it has the batch.
    Rows that the table already has will be there twice. Raises BatchNotFinished if no batch is in work.
    """
    from airflow_pgchange.lake.delta.log import repair  # noqa: PLC0415

    row = _in_work(results, source, feed)
    values = {each.name: row[each.name] for each in fields(Batch) if each.name in row}
    batch = Batch.from_json({**values, "feed": feed.name})
    repair(table, batch)
    return batch.id


def _in_work(results: Connection, source: Connection, feed: Feed) -> dict[str, Any]:
    batch = in_work(results, source, feed)
    if batch is None:
        raise BatchNotFinished(
            f"{feed.name} has no batch in work, that is, no batch that was claimed and not acked"
        )
    return batch


def end_leases(source: Connection, feed: Feed) -> int:
    """End the leases of the consumer's batches, and return how many there were.

    The batches can be claimed again at once. From the next claim on, the earlier attempt cannot ack.
    """
    return int(ask(source, feed.end_leases()))


def repair_consumer(results: Connection, source: Connection, feed: Movable) -> str:
    """Set the consumer to the position that the source has recorded for it. For use after the source was restored, was
    upgraded, or lost its latest commits.

    Returns the guarantee for the batches from here on: ``exactly once``, or ``at least once`` if processed batches come
    again. Raises ConsumerBusy while the consumer is at work, as ``move_consumer`` and ``drop_consumer`` do.
    """
    return str(ask(results, feed.adopt_mark(ask(source, feed.mark()))))


def move_consumer(results: Connection, source: Connection, feed: Movable, to: datetime | str) -> None:
    """Move the consumer.

    To ``"beginning"``: it starts with the oldest changes that the source still has. To ``"now"``: all present changes
    count as processed. To a time: all changes written before it count as processed.

    Raises ConsumerBusy while the consumer is at work, and UnknownConsumer if it does not exist. Raises InvalidArgument
    for a time if the feed does not support times: positions in a topology's log are terms and indexes.
    """
    point = None if to == "beginning" else ask(source, feed.point_at(None if to == "now" else to))
    # Hold the consumer's lock, and commit at the source first. Otherwise the source could trim changes that the moved
    # consumer needs again.
    with translated(), results.transaction():
        if not ask(results, feed.lock()):
            raise ConsumerBusy(f"{feed.name} is at work: stop it, or wait until its batch has ended")
        version = ask(source, feed.note_move(position(results, feed), point))
        ask(results, feed.move_to(point, version))


def register_consumer(
    results: Connection, source: Connection, feed: Movable, start: Start = BEGINNING
) -> None:
    """Register a new consumer that starts at ``start``: ``"beginning"``, ``"now"``, a time or a point.

    ``"beginning"`` is the oldest change that the source still has. Raises InvalidArgument if the consumer is registered
    already, and for a time if the feed does not support times.
    """
    if ask(results, feed.position()) is not None:
        raise InvalidArgument(
            f"{feed.name} is registered already, and keeps its position: `airflow-pgchange move` moves it"
        )
    placed: Any = replace(feed, start=start)  # type: ignore[type-var]
    with translated():
        start_position.start(results, source, placed)


def drop_consumer(results: Connection, source: Connection, feed: Movable) -> None:
    """Delete the consumer with its progress, its claim and its dead letters. A consumer of the same name begins anew."""
    if source is not results:
        _check_unleased(results, source, feed)
    ask(results, feed.forget())
    if source is not results and ask(source, feed.known()):
        ask(source, feed.forget())


def _check_unleased(results: Connection, source: Connection, feed: Movable) -> None:
    """Raise Leased if the consumer's batch is leased. Leases are stored at the source."""
    at = ask(results, feed.position())
    batch = None if at is None else ask(source, feed.in_work(at))
    if batch is not None and "leased_until" in batch:
        raise Leased(
            f"batch {batch['id']} of {feed.name} is leased until {batch['leased_until']} by {batch['leased_by']}. Wait "
            f"until it is acked or the lease ends; or end the lease: airflow-pgchange release {shlex.quote(feed.name)}"
        )


def trim_commit_queue(
    source: Connection,
    retention: Seconds | None = None,
    *,
    retention_bytes: Bytes | None = None,
    retention_count: int | None = None,
) -> list[str]:
    """Delete history of the commit queue that all consumers have processed.

    History goes if it is older than ``retention``, or beyond the newest ``retention_bytes`` or ``retention_count``
    commits. Returns a line for each deleted part. Raises InvalidArgument for invalid limits.
    """
    limits = limits_of(retention, retention_bytes, retention_count)
    return all_lines(source, "pubsub.trim_commit_queue", *limits)


def limits_of(
    retention: Seconds | None, retention_bytes: Bytes | None, retention_count: int | None
) -> Limits:
    """Return how much history stays, as the SQL functions take it. Raises InvalidArgument."""
    if retention_count is not None:
        check_count("retention_count", retention_count)
    return span("retention", retention), size("retention_bytes", retention_bytes), retention_count
