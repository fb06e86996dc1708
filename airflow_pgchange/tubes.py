"""Tubes beside their feed: attaching tables, touching by a query, backfilling, and giving up what is gone downstream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

import psycopg
from psycopg import errors, sql
from psycopg.rows import class_row, dict_row

from airflow_pgchange.feeds.asking import ask
from airflow_pgchange.feeds.calls import call, select
from airflow_pgchange.feeds.connect import connect
from airflow_pgchange.feeds.errors import ConsumerBusy, InvalidArgument, Stopped, translated
from airflow_pgchange.feeds.reading import table_identifier
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.feeds.tube import TubeFeed

CHUNK = 10_000
"""Ids that are looked at in one go while a downstream is compared with its table."""
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
class Control:
    """A control pod whose turn has come: all that was touched in its shard before it is done.

    ``backfill_end``: of ``table`` the downstream gives up what it has not written since ``start_seq``. ``truncate``: all
    that it had of ``table`` before ``seq``.
    """

    seq: int
    shard: int
    type: str
    table: str
    start_seq: int | None = None


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
    """Give up the batch that a worker claimed and cannot finish; its ids stay in ``tube.skipped``. Returns its id.

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
    """The tables that touch a tube, as ``schema.table``."""
    rows = connection.execute(
        "select n.nspname || '.' || c.relname from tube.tube_list() as t join pg_class as c on c.oid = t.tbl "
        "join pg_namespace as n on n.oid = c.relnamespace where t.tube = %s order by 1",
        [tube],
    )
    return [row[0] for row in rows.fetchall()]


Downstream = Callable[[Control], Iterable[int]]
"""Which ids a downstream holds and may have to give up. One too many does no harm: each is read anew."""


@dataclass(frozen=True)
class TableDownstream:
    """A table that is a copy: ids that it holds and its source table does not.

    In ``table`` ``{tube}`` and ``{table}`` stand for the names of the tube and of the source table, without its schema.
    ``shard_column`` is needed where a copy holds several tables' rows.
    """

    results: str = field(repr=False)
    source: str = field(repr=False)
    feed: TubeFeed
    table: str
    key: str = "id"
    shard_column: str | None = None

    def __call__(self, control: Control) -> Iterator[int]:
        with translated(), connect(self.results) as results, connect(self.source, primary=True) as source:
            copy = self.table.format(tube=self.feed.tube, table=control.table.rpartition(".")[2])
            self._check(source)
            for ids in self._held(results, copy, control.shard):
                yield from _absent(source, self.feed.tube, control.table, ids)

    def _check(self, source: psycopg.Connection[Any]) -> None:
        attached = ask(
            source, sql.SQL("select count(*) from tube.tube_list() where tube = {}").format(self.feed.tube)
        )
        if attached > 1 and self.shard_column is None and "{table}" not in self.table:
            raise InvalidArgument(
                f"{attached} tables touch tube {self.feed.tube}, so {self.table} must say which shard a row is of: "
                "name its shard_column"
            )

    def _held(self, results: psycopg.Connection[Any], copy: str, shard: int) -> Iterator[list[int]]:
        of_shard = (
            sql.SQL("")
            if self.shard_column is None
            else sql.SQL("and {} = {}").format(sql.Identifier(self.shard_column), shard)
        )
        query = "select {0} from {1} where {0} > {2} {3} order by {0} limit {4}"
        last = -(2**63)
        while True:
            rows = results.execute(
                sql.SQL(query).format(sql.Identifier(self.key), table_identifier(copy), last, of_shard, CHUNK)
            ).fetchall()
            if not rows:
                return
            yield [row[0] for row in rows]
            last = rows[-1][0]


def _absent(source: psycopg.Connection[Any], tube: str, table: str, ids: list[int]) -> list[int]:
    """Those of the ids that have no row in the table; all, if there is no such table any more."""
    column = ask(
        source,
        sql.SQL("select id_column from tube.attachment where (tube, tbl) = ({}, to_regclass({}))").format(
            tube, table
        ),
    )
    query = sql.SQL(
        "select w.id from unnest({0}::bigint[]) as w(id) where not exists (select from {1} as t where t.{2} = w.id)"
    ).format(ids, sql.SQL(table), sql.Identifier(column or "id"))
    try:
        return [row[0] for row in source.execute(query).fetchall()]
    except errors.UndefinedTable:
        return ids


def work_off_controls(
    feed: TubeFeed, source: str, downstream: Downstream, *, wait: float | None = 0
) -> list[tuple[Control, int]]:
    """Work off the control pods of a worker whose turn has come; returns each with the number of ids that it touched.

    What the downstream has to give up is touched, so that it takes the path of a deletion: read anew, and deleted if
    it is gone. Exactly once: touches and the end of the pod are one transaction, which holds the worker's lock. Raises
    ConsumerBusy while the worker is at work for longer than ``wait`` seconds.
    """
    done = []
    with ConsumerTransaction(feed, source, wait=wait) as consumer:
        if consumer.busy:
            raise ConsumerBusy(f"{feed.name} is at work in another transaction")
        with translated():
            for control in _controls(consumer.connection, feed):
                touched = 0
                held = iter(downstream(control) if control.type in ("backfill_end", "truncate") else ())
                while ids := list(islice(held, CHUNK)):
                    touched += ask(consumer.connection, _about(feed, "tube.collect", control, ids))
                ask(consumer.connection, _about(feed, "tube.control_done", control))
                done.append((control, touched))
    return done


def scheduled(connection: psycopg.Connection[Any], feed: TubeFeed) -> list[tuple[Control, str]]:
    """The backfills that ``tube.tube_backfill_schedule`` asked a worker for, each with its order column."""
    rows = _control_rows(connection, feed)
    return [
        (_control(row), row["payload"]["order_col"]) for row in rows if row["type"] == "backfill_schedule"
    ]


def control_done(connection: psycopg.Connection[Any], feed: TubeFeed, control: Control) -> None:
    """Take away a control pod that is worked off."""
    ask(connection, _about(feed, "tube.control_done", control))


def _controls(connection: psycopg.Connection[Any], feed: TubeFeed) -> list[Control]:
    return [_control(row) for row in _control_rows(connection, feed) if row["type"] != "backfill_schedule"]


def _control_rows(connection: psycopg.Connection[Any], feed: TubeFeed) -> list[dict[str, Any]]:
    query = sql.SQL("select * from {}").format(
        call("tube.control_pods", feed.tube, feed.workers, feed.worker)
    )
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query).fetchall()


def _control(row: dict[str, Any]) -> Control:
    start = row["payload"].get("start_seq")
    return Control(
        row["seq"], row["shard"], row["type"] or "", row["tbl"] or "", None if start is None else int(start)
    )


def _about(feed: TubeFeed, function: str, control: Control, *arguments: Any) -> sql.Composed:
    return select(function, feed.tube, feed.workers, feed.worker, control.seq, *arguments)
