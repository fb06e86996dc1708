"""What only tubes need: attaching, touching, backfilling, and giving up what is gone downstream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from airflow_pgchange import controls, tubes
from airflow_pgchange.arguments import FeedLike, feed_of, json_of
from airflow_pgchange.controls import Downstream, TableDownstream
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.tubes import Progress

if TYPE_CHECKING:
    from airflow.sdk import Context

SAY_EVERY = 10.0
"""Seconds between two lines about a backfill in the log."""


class TubeAttachOperator(BaseOperator):
    """Makes a tube if it is not there, and lets tables touch it. Doing it twice does nothing.

    :param tube: its name (templated)
    :param tables: the tables, as ``schema.table`` (templated)
    :param shard: their shard; default: the number at the end of each one's schema
    :param id_column: the column that holds their ids
    :param workers: how many workers share the tube; default: 1, or what it has
    :param predicate: SQL over a row that says whether touching it counts; default: what the tube has. It runs with
        the rights of the owner of each table
    :param postgres_conn_id: the database of the tables, as their owner
    """

    template_fields: Sequence[str] = ("tube", "tables", "shard", "predicate", "postgres_conn_id")

    def __init__(
        self,
        *,
        tube: str,
        tables: Sequence[str] | str,
        shard: int | str | None = None,
        id_column: str | None = None,
        workers: int | None = None,
        predicate: str | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tube = tube
        self.tables = tables
        self.shard = shard
        self.id_column = id_column
        self.workers = workers
        self.predicate = predicate
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> None:
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            tubes.ensure(connection, self.tube, self.workers, self.predicate)
            for table in _names(self.tables):
                tubes.attach(
                    connection, self.tube, table, shard=_number(self.shard), id_column=self.id_column
                )
                self.log.info("%s touches tube %s", table, self.tube)


class TubeTouchOperator(BaseOperator):
    """Touches the ids that a query returns: a fan-out, such as all flights of a carrier that was renamed.

    The query is SQL that runs with the rights of the connection: let only its owner write it. Touched once a run: a
    run that is tried again touches again, which does no harm.

    :param tube: the tube, or several (templated)
    :param query: a query with one column, the ids (templated)
    :param shard: the shard that the ids are of (templated)
    :param op: I, U, D, T, or B for a backfill's lower priority
    """

    template_fields: Sequence[str] = ("tube", "query", "shard", "postgres_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"query": "sql"}

    def __init__(
        self,
        *,
        tube: Sequence[str] | str,
        query: str,
        shard: int | str = 0,
        op: str = "T",
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tube = tube
        self.query = query
        self.shard = shard
        self.op = op
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> None:
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            tubes.touch(connection, _names(self.tube), self.query, _number(self.shard) or 0, self.op)


class _Backfilling(BaseOperator):
    """Says how far a backfill is, now and then, and stops behind a chunk when the task is killed."""

    _killed = False
    _said = float("-inf")

    def on_kill(self) -> None:
        """Stop behind the chunk in work; the next run goes on there."""
        self._killed = True

    def _say(self, what: str, progress: Progress) -> None:
        if progress.finished or time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            self.log.info(
                "backfill %d of %s: %d of about %d rows, %s",
                progress.id,
                what,
                progress.looked_at,
                progress.total,
                progress.state,
            )


class TubeBackfillOperator(_Backfilling):
    """Touches every row of attached tables, behind everything that is touched meanwhile.

    In chunks of a transaction each: a run that was killed goes on at the same chunk, and ``tube.backfills()`` shows
    its progress to everybody. With ``resumable=False`` in the three steps of the manual instead, the last of which is
    one transaction a table. Tables side by side: map this operator over them.

    :param tube: the tube (templated)
    :param tables: the attached tables (templated)
    :param order_col: the column in whose order rows are touched (templated)
    :param shard: the tables' shard; default: the one that each is attached with (templated)
    :param chunk_size: rows a chunk (templated)
    :param pause: seconds between two chunks (templated)
    :param timeout: seconds to wait, at its beginning, for transactions that write the table
    :param resumable: in chunks, or in three steps
    """

    template_fields: Sequence[str] = (
        "tube",
        "tables",
        "order_col",
        "shard",
        "chunk_size",
        "pause",
        "postgres_conn_id",
    )

    def __init__(
        self,
        *,
        tube: str,
        tables: Sequence[str] | str,
        order_col: str,
        shard: int | str | None = None,
        chunk_size: int | str = 20_000,
        pause: float | str = 0.0,
        timeout: float = 60.0,
        resumable: bool = True,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tube = tube
        self.tables = tables
        self.order_col = order_col
        self.shard = shard
        self.chunk_size = chunk_size
        self.pause = pause
        self.timeout = timeout
        self.resumable = resumable
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns the number of rows that were looked at, by table; none for the three steps."""
        looked_at = {}
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            for table in _names(self.tables):
                shard = _number(self.shard)
                if not self.resumable:
                    tubes.backfill_in_steps(
                        connection, self.tube, table, self.order_col, shard=shard, timeout=self.timeout
                    )
                    continue
                done = tubes.backfill(
                    connection,
                    self.tube,
                    table,
                    self.order_col,
                    shard=shard,
                    chunk_size=int(self.chunk_size),
                    pause=float(self.pause),
                    timeout=self.timeout,
                    told=partial(self._say, table),
                    stopped=lambda: self._killed,
                )
                looked_at[table] = done.looked_at
        return looked_at


class TubeGarbageCollectOperator(_Backfilling):
    """Works off control pods: carries out the backfills that ``tube.tube_backfill_schedule`` asked for, and gives up
    downstream what is gone, behind a backfill what it did not write again, and what was truncated.

    What the downstream names is touched, so the worker reads it anew and deletes what is gone. Exactly once: touches and
    the end of the control pod are one transaction.

    :param feed: the worker's feed, or its JSON (templated)
    :param downstream: the table that is a copy, as ``schema.table``, in which ``{tube}`` and ``{table}`` stand for the
        names of the tube and of the table that was copied (templated); or a callable that gets a
        ``airflow_pgchange.controls.Control`` and returns the ids that it holds and was asked to give up
    :param key: the column of its ids
    :param shard_column: the column of their shard, where the copy holds several tables' rows
    :param postgres_conn_id: the database of the downstream table
    :param source_conn_id: the database of the tube; default: the same
    :param wait_for: seconds to wait for the worker; None: as long as it takes
    :param skip_if_empty: skip the task where no control pod's turn has come
    """

    template_fields: Sequence[str] = ("feed", "downstream", "postgres_conn_id", "source_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}
    shallow_copy_attrs: Sequence[str] = ("downstream",)

    def __init__(
        self,
        *,
        feed: FeedLike,
        downstream: str | Downstream,
        key: str = "id",
        shard_column: str | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        wait_for: float | None = None,
        skip_if_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.feed = json_of(feed)
        self.downstream = downstream
        self.key = key
        self.shard_column = shard_column
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.wait_for = wait_for
        self.skip_if_empty = skip_if_empty

    def execute(self, context: Context) -> dict[str, int]:
        """Returns how many control pods were worked off, and how many ids they touched."""
        feed = _tube_feed(self.feed)
        results = PgChangeHook(self.postgres_conn_id).conninfo()
        source = PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else results
        downstream = self.downstream
        if isinstance(downstream, str):
            downstream = TableDownstream(results, source, feed, downstream, self.key, self.shard_column)
        done = controls.work_off(
            feed,
            source,
            downstream,
            wait=self.wait_for,
            told=partial(self._say, feed.tube),
            stopped=lambda: self._killed,
        )
        for control, touched in done:
            self.log.info(
                "%s: %s of %s worked off, %d ids touched", feed.name, control.type, control.table, touched
            )
        if not done and self.skip_if_empty:
            raise AirflowSkipException(f"{feed.name}: no control pod's turn has come")
        return {"controls": len(done), "touched": sum(touched for _, touched in done)}


def _tube_feed(value: FeedLike) -> TubeFeed:
    feed = feed_of(value)
    if not isinstance(feed, TubeFeed):
        raise InvalidArgument(f"{feed.name} is a {feed.kind} feed, and this is about tubes")
    return feed


def _names(value: Sequence[str] | str) -> list[str]:
    """Names, or a text of them with commas between, as a form's field gives it."""
    names = value.split(",") if isinstance(value, str) else value
    return [name.strip() for name in names if name.strip()]


def _number(value: int | str | None) -> int | None:
    return None if value is None or value == "" else int(value)
