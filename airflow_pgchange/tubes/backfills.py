"""Backfills: whole tables replayed in chunks, or by three steps, in transactions of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, sql

from airflow_pgchange.feeds.connect import keep_open, read_committed
from airflow_pgchange.feeds.errors import InvalidArgument, Stopped, translated
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.feeds.retrying import past_deadlocks
from airflow_pgchange.feeds.tables import found, table_identifier
from airflow_pgchange.stopping import Stop

LOOK_AGAIN = 1.0
"""Seconds between two looks at a backfill that a person has paused."""


@dataclass(frozen=True)
class Progress:
    """Of a backfill: ids ``touched`` by the latest chunk, rows ``looked_at`` of about ``total``.

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
    pause: float = 0.0,
    timeout: float = 60.0,
    told: Callable[[Progress], None] = lambda progress: None,
    stop: Stop | None = None,
) -> Progress:
    """Touch every row of an attached table as pods of op B, a transaction a chunk, in the order of ``order_col`` or,
    without one, of the ids.

    One that was begun and not finished goes on where it stopped, with the ``chunk_size`` that it was begun with. Before
    its first chunk it waits up to ``timeout`` seconds for who was writing the table; between two chunks it rests for
    ``pause`` seconds; while a person has paused it, it waits. ``told`` hears of each chunk. The connection must be in
    autocommit; its session may be idle as long as it likes from here on.

    Raises Stopped, also where somebody cancelled it: what was touched stays touched. Refused where the table is not
    attached, its last backfill is not worked off, or the column or the chunk will not do, and where it failed meanwhile;
    ConsumerBusy if transactions that write the table do not end within ``timeout`` seconds; UnknownConsumer for a tube
    that is not there; InvalidArgument for a table that is not there, and for a pause that is not a number of seconds.
    """
    if not math.isfinite(pause) or pause < 0:
        raise InvalidArgument(f"pause must be a number of seconds from 0 on, and is {pause}")
    stop = stop or Stop()
    keep_open(connection)
    name = table_identifier(table).as_string(None)
    begin = sql.SQL("select tube.backfill_begin({}, {}::regclass, {}, {}, {})")
    with _unless(stop, f"the backfill of {table} was stopped before it began"), found(table):
        number = committed(connection, begin.format(tube, name, order_col, shard, chunk_size))
    for progress in chunks(connection, number, timeout=timeout, stopped=stop):
        told(progress)
        if progress.finished:
            break
        if progress.state == "cancelled":
            raise Stopped(f"backfill {number} of {table} was cancelled; what it touched stays touched")
        stop.rest(LOOK_AGAIN if progress.state == "paused" else pause)
    return progress


def chunks(
    connection: psycopg.Connection[Any],
    number: int,
    *,
    timeout: float = 60.0,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Progress]:
    """Carry out a backfill that was begun, chunk by chunk, without an end of its own: how far it is after each.

    Raises Refused where it failed, with the reason, and Stopped, also where the chunk in work was cancelled for that.
    """
    chunk = sql.SQL("select to_jsonb(c) from tube.backfill_chunk({}, make_interval(secs => {})) as c")
    while True:
        with _unless(stopped, f"backfill {number} was stopped; the next one goes on where it is"):
            done = committed(connection, chunk.format(number, timeout))
        yield Progress(number, **done)


def backfill_in_steps(
    connection: psycopg.Connection[Any],
    tube: str,
    table: str,
    order_col: str,
    *,
    shard: int | None = None,
    timeout: float = 60.0,
    stop: Stop | None = None,
) -> None:
    """The same by ``tube.tube_backfill_step1`` to ``3``, each in a transaction of its own; not resumable.

    Raises Refused where the last backfill is not worked off yet, and Stopped, upon which nothing was touched.
    """
    stop = stop or Stop()
    why = f"the backfill of {table} was stopped; nothing was touched"
    name = table_identifier(table).as_string(None)
    step2 = sql.SQL("select tube.tube_backfill_step2(make_interval(secs => {}))")
    # By itself step 3 says only in a notice, which need not come through, that it did nothing.
    check = sql.SQL(
        "select tube.check_replayed(a.tube, a.tbl, a.shard) from tube.lock_backfill({}, {}::regclass, {}) as a"
    )
    step3 = sql.SQL("select tube.tube_backfill_step3({}, {}, {}::regclass, {}, {})")
    with _unless(stop, why):
        begun = ask(connection, select("tube.tube_backfill_step1"))
    with _unless(stop, why):
        ask(connection, step2.format(timeout))

    def touch() -> None:
        with read_committed(connection):
            ask(connection, check.format(tube, name, shard))
            ask(connection, step3.format(begun, tube, name, order_col, shard))

    with _unless(stop, why), found(table), translated():
        past_deadlocks(touch)


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
