"""Backfills: touch all rows of a table in chunks, each in a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, sql

from airflow_pgchange.errors import Stopped
from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.feeds.connections import kept_open, read_committed
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.retries import past_deadlocks
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.feeds.table_names import requires_table, table_identifier

LOOK_AGAIN = 1.0
"""Seconds between two checks of a backfill that a person has paused."""


@dataclass(frozen=True)
class BackfillProgress:
    """The progress of a backfill: ids ``touched`` by the latest chunk, and rows ``looked_at`` of about ``total``.

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
    """Touch every row of an attached table with op B, in chunks, each in a transaction of its own.

    Rows are read in the order of ``order_col``, by default of the ids. An unfinished backfill continues where it
    stopped, with its first ``chunk_size``. Before the first chunk it waits up to ``timeout`` for transactions that
    write the table. It sleeps for ``pause`` between two chunks, and waits while a person has paused it. ``on_progress``
    is called after each chunk. The connection must be in autocommit mode; the idle timeout of its session is turned
    off.

    Raises Stopped, also if the backfill is cancelled; rows that were touched stay touched. Raises Refused if the table
    is not attached, if its last backfill was not replayed yet, or if the backfill failed meanwhile. Also if the column
    or the chunk size is not possible. Raises ConsumerBusy if transactions that write the table do not end within
    ``timeout``. Raises UnknownConsumer if the tube does not exist, and InvalidArgument for a table that does not exist
    or an invalid pause.
    """
    rest = seconds("pause", pause)
    stop = stop or Stop()
    name = table_identifier(table).as_string(None)
    begin = sql.SQL("select tube.backfill_begin({}, {}::regclass, {}, {}, {})")
    with kept_open(connection):
        with _unless(stop, f"the backfill of {table} was stopped before it began"), requires_table(table):
            number = committed(connection, begin.format(tube, name, order_col, shard, chunk_size))
        for progress in backfill_chunks(connection, number, timeout=timeout, stopped=stop):
            on_progress(progress)
            if progress.finished:
                break
            if progress.state == "cancelled":
                raise Stopped(
                    f"backfill {number} of {table} was cancelled; the rows that it touched stay touched"
                )
            stop.rest(LOOK_AGAIN if progress.state == "paused" else rest)
        return progress


def ask_backfill(connection: psycopg.Connection[Any], tube: str, table: str) -> int:
    """Ask the workers of a tube for a backfill of an attached table, in the order of its ids, and return its number.
    They carry it out with their control pods. If the table has an unfinished backfill, its number is returned."""
    name = table_identifier(table).as_string(None)
    with requires_table(table):
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
    """Carry out a backfill chunk by chunk, and yield its progress after each chunk. The caller ends the loop.

    Raises Refused, with the reason, if the backfill has failed. Raises Stopped, also if a running chunk was cancelled
    because of ``stopped``.
    """
    chunk = sql.SQL("select to_jsonb(c) from tube.backfill_chunk({}, make_interval(secs => {})) as c")
    while True:
        with _unless(stopped, f"backfill {number} was stopped; the next run continues it there"):
            done = committed(connection, chunk.format(number, seconds("timeout", timeout)))
        yield BackfillProgress(number, **done)


@contextmanager
def _unless(stopped: Callable[[], bool], why: str) -> Iterator[None]:
    """Raise Stopped if a stop was requested before the block, or if its statement was cancelled because of that."""
    if stopped():
        raise Stopped(why)
    try:
        yield
    except errors.QueryCanceled as error:
        if stopped():
            raise Stopped(why) from error
        raise


def committed(connection: psycopg.Connection[Any], query: sql.Composed) -> Any:
    """Return the value of a query that runs in a READ COMMITTED transaction of its own, whatever the role's default is.

    Retry after a deadlock: PostgreSQL may cancel this transaction although it only waits behind writers of the table.
    """

    def transaction() -> Any:
        with read_committed(connection):
            return ask(connection, query)

    with translated():
        return past_deadlocks(transaction)
