"""What a person does with consumers of a topology: look, repair, move, drop. One is skipped as any consumer is."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from airflow_pgchange.feeds.errors import InvalidArgument, translated
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.feeds.remote_status import elsewhere
from airflow_pgchange.feeds.topology import TopologyFeed

Connection = psycopg.Connection[Any]


def status(results: Connection, source: Connection) -> list[dict[str, Any]]:
    """Every consumer whose progress is in ``results``, as ``topology.status()`` has it. Ages in seconds; ``ready`` exact
    up to 1,000; ``held_back_by`` says where a person must decide first, and then the lag is None."""
    with translated(), results.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute("select * from topology.status()").fetchall()
    if source is not results:
        for row in rows:
            row["held_back_by"] = None
            row.update(elsewhere(results, source, TopologyFeed(row["consumer_id"])))
    return rows


def repair(results: Connection, source: Connection, feed: TopologyFeed) -> str:
    """Go on from what the catalogue still knows of the consumer, after it lost its tail or was restored.

    Returns the guarantee from here on: ``exactly once``, or ``at least once`` where processed batches come again.
    """
    with translated():
        mark = ask(source, select("topology.mark", feed.consumer_id))
        return str(ask(results, select("topology.adopt_mark", feed.consumer_id, mark)))


def move(results: Connection, source: Connection, feed: TopologyFeed, to: datetime | str) -> None:
    """Move the consumer to the ``"beginning"`` of the log, or to ``"now"`` (all that is there counts as processed).

    Raises InvalidArgument for a time: a topology's log is read from its beginning or not at all.
    """
    if to not in ("beginning", "now"):
        raise InvalidArgument(
            f"{feed.name} can move to beginning or now, not to {to}: its log goes by term and index"
        )
    with translated():
        point = None if to == "beginning" else ask(source, feed.point())
        ask(results, select("topology.move_consumer", feed.consumer_id, point))


def drop(results: Connection, source: Connection, feed: TopologyFeed) -> None:
    """Forget the consumer, its progress, its claim and its dead letters: under the same name it would begin anew."""
    with translated():
        ask(results, select("topology.drop_consumer", feed.consumer_id))
        left = sql.SQL("select exists (select from topology.claim where consumer_id = {})").format(
            feed.consumer_id
        )
        if source is not results and ask(source, left):
            ask(source, select("topology.drop_consumer", feed.consumer_id))
