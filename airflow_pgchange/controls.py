"""Control pods of tubes: scheduled backfills, and what a downstream gives up behind one or behind a truncate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from airflow_pgchange.feeds.asking import ask
from airflow_pgchange.feeds.calls import call, select
from airflow_pgchange.feeds.connect import connect
from airflow_pgchange.feeds.errors import ConsumerBusy, InvalidArgument, translated
from airflow_pgchange.feeds.reading import table_identifier
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.tubes import Progress, backfill

CHUNK = 10_000
"""Ids that are looked at in one go while a downstream is compared with its table."""


@dataclass(frozen=True)
class Control:
    """A control pod whose turn has come: all that was touched in its shard before it is done.

    ``backfill_end``: of ``table`` the downstream gives up what it has not written since ``start_seq``. ``truncate``: all
    that it had of ``table`` before ``seq``. ``backfill_schedule``: somebody asks for a backfill by ``order_col``.
    """

    seq: int
    shard: int
    type: str
    table: str
    start_seq: int | None = None
    order_col: str | None = None


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
    # The name comes from a pod, so PostgreSQL resolves and quotes it.
    row = source.execute(
        "select to_regclass(%s)::text, coalesce(tube.id_column(to_regclass(%s), %s)::text, 'id')",
        [table, table, tube],
    ).fetchone()
    if row is None or row[0] is None:
        return ids
    query = sql.SQL(
        "select w.id from unnest({0}::bigint[]) as w(id) where not exists (select from {1} as t where t.{2} = w.id)"
    ).format(ids, sql.SQL(row[0]), sql.Identifier(row[1]))
    return [row[0] for row in source.execute(query).fetchall()]


def work_off(
    feed: TubeFeed,
    source: str,
    downstream: Downstream,
    *,
    wait: float | None = 0,
    told: Callable[[Progress], None] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[tuple[Control, int]]:
    """Work off the control pods of a worker whose turn has come; returns each with the number of ids that it touched.

    First the backfills that were scheduled, as ``tubes.backfill`` does them: ``told`` hears of their chunks. Then what
    the downstream has to give up is touched, so that it takes the path of a deletion: read anew, and deleted if it is
    gone. Exactly once: these touches and the end of the pods are one transaction, which holds the worker's lock. Raises
    ConsumerBusy while the worker is at work for longer than ``wait`` seconds, and Stopped.
    """
    filled = _backfill_as_scheduled(feed, source, told, stopped)
    done = []
    with ConsumerTransaction(feed, source, wait=wait, stopped=stopped) as consumer:
        if consumer.busy:
            raise ConsumerBusy(f"{feed.name} is at work in another transaction")
        with translated():
            for control in _due(consumer.connection, feed):
                if control.type == "backfill_schedule" and control not in filled:
                    continue
                touched = filled.get(control, 0)
                held = iter(downstream(control) if control.type in ("backfill_end", "truncate") else ())
                while ids := list(islice(held, CHUNK)):
                    touched += ask(consumer.connection, _about(feed, "tube.collect", control, ids))
                ask(consumer.connection, _about(feed, "tube.control_done", control))
                done.append((control, touched))
    return done


def _backfill_as_scheduled(
    feed: TubeFeed, source: str, told: Callable[[Progress], None], stopped: Callable[[], bool]
) -> dict[Control, int]:
    """Rows that were touched, by the control pod that asked for it."""
    with translated(), connect(source, primary=True) as connection:
        asked = [control for control in _due(connection, feed) if control.type == "backfill_schedule"]
        return {
            control: backfill(
                connection,
                feed.tube,
                control.table,
                control.order_col or "id",
                shard=control.shard,
                told=told,
                stopped=stopped,
            ).looked_at
            for control in asked
        }


def _due(connection: psycopg.Connection[Any], feed: TubeFeed) -> list[Control]:
    query = sql.SQL("select * from {}").format(
        call("tube.control_pods", feed.tube, feed.workers, feed.worker)
    )
    with connection.cursor(row_factory=dict_row) as cursor:
        return [_control(row) for row in cursor.execute(query).fetchall()]


def _control(row: dict[str, Any]) -> Control:
    start = row["payload"].get("start_seq")
    return Control(
        seq=row["seq"],
        shard=row["shard"],
        type=row["type"] or "",
        table=row["tbl"] or "",
        start_seq=None if start is None else int(start),
        order_col=row["payload"].get("order_col"),
    )


def _about(feed: TubeFeed, function: str, control: Control, *arguments: Any) -> sql.Composed:
    return select(function, feed.tube, feed.workers, feed.worker, control.seq, *arguments)
