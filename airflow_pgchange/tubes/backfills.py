"""Backfills: whole tables replayed in chunks, in transactions of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, sql

from airflow_pgchange.errors import Stopped
from airflow_pgchange.feeds.checks import Seconds, seconds
from airflow_pgchange.feeds.connections import kept_open, read_committed
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.retrying import past_deadlocks
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.feeds.tables import found, table_identifier

LOOK_AGAIN = 1.0
"""Seconds between two looks at a backfill that a person has paused."""


@dataclass(frozen=True)
class BackfillProgress:
    """How far a backfill is: ids ``touched`` by the latest chunk, rows ``looked_at`` of about ``total``.

    ``state``: scheduled, running, paused, done, cancelled, failed.
    """

    id: int
    touched: int
    looked_at: int
    total: int
    finished: bool
    state: str


def backfill(
    connection: psycopg.Connection[Any],
    tube: str,
    table: str,
    order_col: str | None = None,
    *,
    shard: int | None = None,
    chunk_size: int = 50_000,
    pause: Seconds = 0.0,
    timeout: Seconds = 60.0,
    on_progress: Callable[[BackfillProgress], None] = lambda progress: None,
    stop: Stop | None = None,
) -> BackfillProgress:
    """Touch every row of an attached table as pods of op B, a transaction a chunk, in the order of ``order_col`` or,
    without one, of the ids.

    One that was begun and not finished goes on where it stopped, with the ``chunk_size`` that it was begun with. Before
    its first chunk it waits up to ``timeout`` for who was writing the table; between two chunks it rests for
    ``pause``; while a person has paused it, it waits. ``on_progress`` is called after each chunk. The connection must be
    in autocommit; its session may be idle as long as it likes from here on.

    Raises Stopped, also where somebody cancelled it: what was touched stays touched. Refused where the table is not
    attached, its last backfill is not worked off, or the column or the chunk will not do, and where it failed meanwhile;
    ConsumerBusy if transactions that write the table do not end within ``timeout``; UnknownConsumer for a tube
    that is not there; InvalidArgument for a table that is not there, and for a pause that is not a number of seconds.
    """
    rest = seconds("pause", pause)
    stop = stop or Stop()
    name = table_identifier(table).as_string(None)
    begin = sql.SQL("select tube.backfill_begin({}, {}::regclass, {}, {}, {})")
    with kept_open(connection):
        with _unless(stop, f"the backfill of {table} was stopped before it began"), found(table):
            number = committed(connection, begin.format(tube, name, order_col, shard, chunk_size))
        for progress in backfill_chunks(connection, number, timeout=timeout, stopped=stop):
            on_progress(progress)
            if progress.finished:
                break
            if progress.state == "cancelled":
                raise Stopped(f"backfill {number} of {table} was cancelled; what it touched stays touched")
            stop.rest(LOOK_AGAIN if progress.state == "paused" else rest)
        return progress


def ask_backfill(connection: psycopg.Connection[Any], tube: str, table: str) -> int:
    """Ask the workers of a tube for a backfill of an attached table, in the order of its ids: the number of the one
    that they carry out with their control pods, or with which they go on if there is one that is not finished."""
    name = table_identifier(table).as_string(None)
    with found(table):
        number: int = committed(
            connection, sql.SQL("select tube.backfill_ask({}, {}::regclass)").format(tube, name)
        )
    return number


def backfill_chunks(
    connection: psycopg.Connection[Any],
    number: int,
    *,
    timeout: Seconds = 60.0,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[BackfillProgress]:
    """Carry out a backfill that was begun, chunk by chunk, without an end of its own: how far it is after each.

    Raises Refused where it failed, with the reason, and Stopped, also where the chunk in work was cancelled for that.
    """
    chunk = sql.SQL("select to_jsonb(c) from tube.backfill_chunk({}, make_interval(secs => {})) as c")
    while True:
        with _unless(stopped, f"backfill {number} was stopped; the next one goes on where it is"):
            done = committed(connection, chunk.format(number, seconds("timeout", timeout)))
        yield BackfillProgress(number, **done)


@contextmanager
def _unless(stopped: Callable[[], bool], why: str) -> Iterator[None]:
    """Raises Stopped where somebody asked for that: before a statement, or while it was at work and was cancelled."""
    if stopped():
        raise Stopped(why)
    try:
        yield
    except errors.QueryCanceled as error:
        if stopped():
            raise Stopped(why) from error
        raise


def committed(connection: psycopg.Connection[Any], query: sql.Composed) -> Any:
    """The value of one query in a transaction of its own, read committed whatever the role's default is. It is begun anew
    where writers of the table were in a deadlock and PostgreSQL chose it, who waited behind them."""

    def transaction() -> Any:
        with read_committed(connection):
            return ask(connection, query)

    with translated():
        return past_deadlocks(transaction)
