"""Tubes beside their feed: attaching tables, touching by a query, backfilling, and what people ask."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from airflow_pgchange.feeds.asking import ask
from airflow_pgchange.feeds.calls import select
from airflow_pgchange.feeds.errors import Stopped, translated
from airflow_pgchange.feeds.reading import table_identifier
from airflow_pgchange.feeds.tube import TubeFeed

LOOK_AGAIN = 1.0
"""Seconds between two looks at a backfill that a person has paused."""


def ensure(
    connection: psycopg.Connection[Any], tube: str, workers: int | None = None, predicate: str | None = None
) -> None:
    """Make a tube in the current schema, or change what is given of one that is there.

    ``predicate`` is SQL over a row that says whether touching it counts; an empty one takes it away.
    """
    ask(connection, select("tube.tube_ensure_exists", tube, workers, predicate))


def attach(
    connection: psycopg.Connection[Any],
    tube: str,
    table: str,
    *,
    shard: int | None = None,
    id_column: str | None = None,
) -> None:
    """Let a table touch a tube, from now on. Twice does nothing.

    ``shard`` is by default the number at the end of the name of the table's schema, ``id_column`` is ``id``.
    """
    name = table_identifier(table).as_string(None)
    query = sql.SQL("select tube.tube_table_ensure_attached({}, {}::regclass, {}, {})")
    ask(connection, query.format(tube, name, shard, id_column))


def touch(
    connection: psycopg.Connection[Any], tubes: Sequence[str], query: str, shard: int, op: str = "T"
) -> None:
    """Touch the ids that ``query`` returns, one column, in each of the tubes; in the order in which they come.

    The query is SQL that runs with the rights of this connection. ``op``: I, U, D, T, or B for a backfill.
    """
    numbered = sql.SQL("select q.id, pg_catalog.row_number() over () from ({}) as q(id)").format(
        sql.SQL(query)
    )
    ask(
        connection,
        select("tube.tube_pods_insert", ",".join(tubes), numbered.as_string(connection), shard, op),
    )


@dataclass(frozen=True)
class Progress:
    """Of a backfill: ids ``touched`` by the latest chunk, rows ``looked_at`` of about ``total``."""

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
    order_col: str,
    *,
    shard: int | None = None,
    chunk_size: int = 20_000,
    pause: float = 0.0,
    timeout: float = 60.0,
    told: Callable[[Progress], None] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Progress:
    """Touch every row of an attached table as pods of op B, a transaction a chunk, in the order of ``order_col``.

    One that was begun and not finished goes on where it stopped. Before its first chunk it waits up to ``timeout``
    seconds for who was writing the table; between two chunks it rests for ``pause`` seconds; while a person has
    paused it, it waits. ``told`` hears of each chunk. Raises Stopped, also where somebody cancelled it: what was touched
    stays touched. The connection must be in autocommit.
    """
    name = table_identifier(table).as_string(None)
    begin = sql.SQL("select tube.backfill_begin({}, {}::regclass, {}, {}, {})")
    number = ask(connection, begin.format(tube, name, order_col, shard, chunk_size))
    chunk = sql.SQL("select to_jsonb(c) from tube.backfill_chunk({}, make_interval(secs => {})) as c")
    while True:
        if stopped():
            raise Stopped(f"backfill {number} of {table} was stopped; the next one goes on where it is")
        progress = Progress(number, **ask(connection, chunk.format(number, timeout)))
        told(progress)
        if progress.finished:
            return progress
        if progress.state == "cancelled":
            raise Stopped(f"backfill {number} of {table} was cancelled; what it touched stays touched")
        time.sleep(LOOK_AGAIN if progress.state == "paused" else pause)


def backfill_in_steps(
    connection: psycopg.Connection[Any],
    tube: str,
    table: str,
    order_col: str,
    *,
    shard: int | None = None,
    timeout: float = 60.0,
) -> None:
    """The same by ``tube.tube_backfill_step1`` to ``3``, each in a transaction of its own; not resumable."""
    begun = ask(connection, select("tube.tube_backfill_step1"))
    ask(connection, sql.SQL("select tube.tube_backfill_step2(make_interval(secs => {}))").format(timeout))
    step3 = sql.SQL("select tube.tube_backfill_step3({}, {}, {}::regclass, {}, {})")
    ask(connection, step3.format(begun, tube, table_identifier(table).as_string(None), order_col, shard))


@dataclass(frozen=True)
class WorkerStatus:
    """A worker of a tube. Ages in seconds; ``ready`` exact up to 1,000; ``attempt`` is that of its batch in work."""

    tube: str
    worker: int
    workers: int
    ready: int
    ready_exact: bool
    oldest_seconds: float | None
    waiting: int
    faults: int
    at_work: bool
    batch_id: Any
    attempt: int | None
    claimed_at: datetime | None
    updated_at: datetime | None

    @property
    def feed(self) -> TubeFeed:
        return TubeFeed(self.tube, self.worker, self.workers)


def status(connection: psycopg.Connection[Any]) -> list[WorkerStatus]:
    """Every worker of every tube that this role may read."""
    with translated(), connection.cursor(row_factory=class_row(WorkerStatus)) as cursor:
        return cursor.execute("select * from tube.status()").fetchall()


def skip(connection: psycopg.Connection[Any], feed: TubeFeed, reason: str) -> str:
    """Give up the batch that a worker claimed and cannot finish; it becomes a dead letter. Returns the batch's id.

    Raises BatchNotFinished where there is none, ConsumerBusy while the worker is at work.
    """
    return str(ask(connection, select("tube.skip_batch", feed.tube, feed.worker, reason)))


def ready(connection: psycopg.Connection[Any]) -> list[TubeFeed]:
    """The workers, of all tubes of this database, that have something to do and are not at work."""
    rows = connection.execute(
        "select tube, worker, workers from tube.status(1) where ready > 0 and not at_work order by tube, worker"
    )
    return [TubeFeed(*row) for row in rows.fetchall()]


def attached(connection: psycopg.Connection[Any], tube: str) -> list[str]:
    """The tables that touch a tube, as ``schema.table``. Raises UnknownConsumer where there is no such tube."""
    return [table for _, table, _ in ask(connection, TubeFeed(tube).attached())]
