"""What a person does with groups of the event log: look, repair, move, drop. A group is skipped as any consumer is."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.event import EventFeed
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.feeds.remote_status import elsewhere

Connection = psycopg.Connection[Any]


def status(results: Connection, source: Connection) -> list[dict[str, Any]]:
    """Every group whose cursor is in ``results``, as ``pgmb.status()`` has it. Ages in seconds; ``ready`` exact up to
    1,000; ``held_back_by`` says where a person must decide first, and then the lag is None."""
    with translated(), results.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute("select * from pgmb.status()").fetchall()
    for row in rows:
        row["held_back_by"] = None
        if source is not results:
            row.update(elsewhere(results, source, EventFeed(row["group_id"])))
    return rows


def repair(results: Connection, source: Connection, feed: EventFeed) -> str:
    """Go on from what the source still knows of the group, after it lost its tail, was restored or was upgraded.

    Returns the guarantee from here on: ``exactly once``, or ``at least once`` where processed batches come again.
    """
    with translated():
        mark = ask(source, select("pgmb.mark", feed.group))
        return str(ask(results, select("pgmb.adopt_mark", feed.group, mark)))


def move(results: Connection, source: Connection, feed: EventFeed, to: datetime | str) -> None:
    """Move the group to the ``"beginning"`` of what the log still has, to ``"now"`` (all that is published counts as
    read), or to a time (all that was dispatched before it counts as read)."""
    with translated():
        cursor = None
        if to != "beginning":
            cursor = ask(source, select("pgmb.cursor_of", None if to == "now" else to))
        # Under the group's lock, and the source commits first: at no moment may what comes again go.
        with results.transaction():
            ask(results, select("pgmb.move_group", feed.group, cursor))
            ask(source, select("pgmb.note_move", feed.group, cursor))


def drop(results: Connection, source: Connection, feed: EventFeed) -> None:
    """Forget the group, its subscriptions, its cursor and its dead letters; it keeps no event from going any more."""
    with translated():
        ask(results, select("pgmb.drop_group", feed.group))
        left = sql.SQL("select exists (select from pgmb.subscription_groups where id = {})").format(
            feed.group
        )
        if source is not results and ask(source, left):
            ask(source, select("pgmb.drop_group", feed.group))
