"""Backfills of tubes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from airflow.sdk import BaseOperator

from airflow_pgchange import tubes
from airflow_pgchange.arguments import Seconds, names, seconds, whole
from airflow_pgchange.feeds.connect import cancel
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.stopping import Stop
from airflow_pgchange.tubes import Progress

if TYPE_CHECKING:
    from airflow.sdk import Context

SAY_EVERY = 10.0
"""Seconds between two lines about a backfill in the log."""


def telling(say: Callable[..., None], what: str) -> Callable[[Progress], None]:
    """Says how far backfills of ``what`` are: each at its first chunk, at its end, and now and then in between."""
    said: dict[int, float] = {}

    def told(progress: Progress) -> None:
        if progress.finished:
            say(
                "backfill %d of %s is done: %s rows; the workers of the tube replay them now",
                progress.id,
                what,
                f"{progress.looked_at:,}",
            )
        elif time.monotonic() - said.get(progress.id, -math.inf) >= SAY_EVERY:
            said[progress.id] = time.monotonic()
            say(
                "backfill %d of %s is %s: %s of about %s rows (%d %%)",
                progress.id,
                what,
                progress.state,
                f"{progress.looked_at:,}",
                f"{progress.total:,}",
                min(99, 100 * progress.looked_at // max(progress.total, 1)),
            )

    return told


class TubeBackfillOperator(BaseOperator):
    """Touches every row of attached tables, after everything that is touched in the meantime.

    In chunks of a transaction each: a run that was killed goes on at the same chunk, and ``tube.backfills()`` shows
    its progress to everybody. With ``resumable=False`` by ``tube.tube_backfill_step1`` to ``3`` instead, the last of
    which is one transaction a table. Tables side by side: map this operator over them. A table whose last backfill the
    workers have not worked off is refused.

    Guarantee: at least once. Every row that is there from the beginning to the end is touched; touching one twice does
    no harm. Raises InvalidArgument for no tables, a table that is not there or a malformed number, Refused for a backfill
    that cannot begin, ConsumerBusy where transactions that write a table do not end within ``timeout``, Stopped when the
    task is killed or the backfill is cancelled.

    :param tube: the tube (templated)
    :param tables: the attached tables: a list, or a text with commas between; ``schema.table``, in which a part in double
        quotes may hold anything (templated)
    :param order_col: the column in whose order rows are touched; default: their ids, but for the three steps (templated)
    :param shard: the tables' shard; default: the one that each is attached with (templated)
    :param chunk_size: rows a chunk; one that goes on keeps the size that it began with (templated)
    :param pause: seconds, or a timedelta, between two chunks (templated)
    :param timeout: how long to wait, at its beginning, for transactions that write the table: seconds, or a timedelta
    :param resumable: in chunks, or in three steps
    :param postgres_conn_id: the database of the tube and the tables
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
        order_col: str | None = None,
        shard: int | str | None = None,
        chunk_size: float | str = 50_000,
        pause: Seconds = 0.0,
        timeout: Seconds = 60.0,
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
        self.timeout = seconds("timeout", timeout)
        self.resumable = resumable
        self.postgres_conn_id = postgres_conn_id
        self._connection: psycopg.Connection[Any] | None = None
        self._stop = Stop()

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns the number of rows that were looked at, by table; none for the three steps."""
        tables, shard = names("tables", self.tables), whole("shard", self.shard)
        chunk_size, pause = whole("chunk_size", self.chunk_size), seconds("pause", self.pause)
        if chunk_size is None:
            raise InvalidArgument("say how many rows a chunk is to have")
        if not (self.resumable or self.order_col):
            raise InvalidArgument("the three steps need an order_col: name the column that they follow")
        looked_at = {}
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            connection.add_notice_handler(lambda notice: self.log.warning("%s", notice.message_primary))
            self._connection = connection
            for table in tables:
                self.log.info(
                    "backfilling %s into tube %s in the order of %s",
                    table,
                    self.tube,
                    self.order_col or "its ids",
                )
                if not self.resumable:
                    tubes.backfill_in_steps(
                        connection,
                        self.tube,
                        table,
                        self.order_col or "",
                        shard=shard,
                        timeout=self.timeout,
                        stop=self._stop,
                    )
                    continue
                done = tubes.backfill(
                    connection,
                    self.tube,
                    table,
                    self.order_col,
                    shard=shard,
                    chunk_size=chunk_size,
                    pause=pause,
                    timeout=self.timeout,
                    told=telling(self.log.info, table),
                    stop=self._stop,
                )
                looked_at[table] = done.looked_at
        return looked_at

    def on_kill(self) -> None:
        """Stop at once, and undo what is in work: a chunk, with which the next run goes on, or one of the three steps."""
        self._stop.ask()
        if self._connection is not None:
            cancel(self._connection)
