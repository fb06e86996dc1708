"""What a person does with consumers of the commit queue: look, repair, move, drop; and with those of any feed: skip."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from airflow_pgchange.feeds.commit import CommitFeed
from airflow_pgchange.feeds.errors import BatchNotFinished, InvalidArgument, translated
from airflow_pgchange.feeds.feed import Feed, progress_at
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.feeds.remote_status import elsewhere, in_work


@dataclass(frozen=True)
class ConsumerStatus:
    """One consumer. Ages in seconds; ``ready`` exact up to 1,000; lag is None where its source was not asked, or where a
    person must decide first, which ``held_back_by`` then says."""

    consumer_id: str
    branch_id: int
    in_order: bool
    version: int
    commit_id: int
    ready: int | None
    ready_exact: bool | None
    oldest_seconds: float | None
    waiting: int | None
    faults: int | None
    at_work: bool
    batch_id: Any
    attempt: int | None
    claimed_at: datetime | None
    updated_at: datetime
    held_back_by: str | None


def status(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any] | None = None
) -> list[ConsumerStatus]:
    """Every consumer whose watermark is in ``results``; ``source`` is asked for those whose commits are elsewhere."""
    names = [field.name for field in fields(ConsumerStatus)]
    with translated(), results.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute("select * from pubsub.status()").fetchall()
        for row in rows:
            if row["ready"] is None and source is not None:
                feed = CommitFeed(row["consumer_id"], row["branch_id"], row["in_order"])
                row.update(elsewhere(results, source, feed))
        return [ConsumerStatus(**{name: row[name] for name in names}) for row in rows]


def skip(results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed, reason: str) -> str:
    """Give up the batch that the consumer claimed and cannot finish; it becomes a dead letter, with ``reason``.

    Returns the batch's id. Raises BatchNotFinished where there is none, ConsumerBusy while the consumer is at work.
    """
    with translated():
        batch = in_work(results, source, feed)
        if batch is None:
            raise BatchNotFinished(
                f"{feed.name} has no batch in work: only one that was claimed and not acked can be skipped"
            )
        ask(progress_at(feed, results, source), feed.skip(batch, reason))
    return str(batch["id"])


def repair(results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: CommitFeed) -> str:
    """Go on from what the source still knows of the consumer, after it lost its tail, was restored or was upgraded.

    Returns the guarantee from here on: ``exactly once``, or ``at least once`` where processed batches come again.
    """
    with translated():
        mark = _call(source, "mark", feed)
        return str(_call(results, "adopt_mark", feed, mark))


def move(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: CommitFeed, to: datetime | str
) -> None:
    """Move the consumer to the ``"beginning"`` (everything comes again), to ``"now"`` (all that is there counts as
    processed), or to a time (all that was written before it counts as processed)."""
    with translated():
        if to == "beginning":
            point: dict[str, Any] = {"snapshot": None}
        else:
            at = None if to == "now" else to
            point = ask(source, select("pubsub.point", feed.branch_id, at))
        _call(results, "move_consumer", feed, point)


def drop(results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: CommitFeed) -> None:
    """Forget the consumer, its watermark, its claim and its dead letters: under the same name it would begin anew."""
    with translated():
        _call(results, "drop_consumer", feed)
        left = sql.SQL("select exists (select from pubsub.claim where (consumer_id, branch_id) = ({}, {}))")
        if source is not results and ask(source, left.format(feed.consumer_id, feed.branch_id)):
            _call(source, "drop_consumer", feed)


def trim(source: psycopg.Connection[Any], keep: str) -> list[str]:
    """Remove history older than ``keep``, a PostgreSQL interval, that all have processed; a line for each thing."""
    query = sql.SQL("select pubsub.trim_commit_queue({}::interval)").format(keep)
    try:
        with translated():
            return [row[0] for row in source.execute(query).fetchall()]
    except psycopg.DataError as error:
        raise InvalidArgument(f"keep: {keep!r} is no interval: write it as '30 days'") from error


def _call(connection: psycopg.Connection[Any], function: str, feed: CommitFeed, *arguments: Any) -> Any:
    return ask(connection, select(f"pubsub.{function}", feed.consumer_id, feed.branch_id, *arguments))
