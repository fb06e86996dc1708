"""Backfills of tubes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from airflow.sdk import BaseOperator

from airflow_pgchange import tubes
from airflow_pgchange.feeds.checks import Seconds
from airflow_pgchange.feeds.connections import cancel
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.tubes import BackfillProgress
from airflow_pgchange.utils import lineage
from airflow_pgchange.utils.arguments import CheckedArguments, Number, checks

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_pgchange.utils.openlineage import Lineage

SAY_EVERY = 10.0
"""Seconds between two lines about a backfill in the log."""


def telling(say: Callable[..., None], what: str) -> Callable[[BackfillProgress], None]:
    """Says how far backfills of ``what`` are: each at its first chunk, at its end, and now and then in between."""
    said: dict[int, float] = {}

    def told(progress: BackfillProgress) -> None:
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


class TubeBackfillOperator(CheckedArguments, BaseOperator):
    """Touches every row of attached tables, after everything that is touched in the meantime.

    In chunks of a transaction each: a run that was killed goes on at the same chunk, and ``tube.backfills()`` shows
    its progress to everybody. Tables side by side: map this operator over them. A table whose last backfill the
    workers have not worked off is refused.

    Guarantee: at least once. Every row that is there from the beginning to the end is touched; touching one twice does
    no harm. Raises InvalidArgument for no tables, a table that is not there or a malformed number, Refused for a backfill
    that cannot begin, ConsumerBusy where transactions that write a table do not end within ``timeout``, Stopped when the
    task is killed or the backfill is cancelled.

    :param tube: the tube (templated)
    :param tables: the attached tables: a list, or a text with commas between; ``schema.table``, in which a part in double
        quotes may hold anything (templated)
    :param order_col: the column in whose order rows are touched; default: their ids (templated)
    :param shard: the tables' shard; default: the one that each is attached with (templated)
    :param chunk_size: rows a chunk; one that goes on keeps the size that it began with (templated)
    :param pause: rest between two chunks (templated)
    :param timeout: how long to wait, at its beginning, for transactions that write the table (templated)
    :param postgres_conn_id: the database of the tube and the tables
    """

    arguments = checks(
        "tube", "tables", "order_col", "shard", "chunk_size", "pause", "timeout", "postgres_conn_id"
    )
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        tube: str,
        tables: Sequence[str] | str,
        order_col: str | None = None,
        shard: Number | None = None,
        chunk_size: Number = 50_000,
        pause: Seconds = 0.0,
        timeout: Seconds = 60.0,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tube = tube
        self.tables: Any = tables
        self.order_col = order_col
        self.shard: Any = shard
        self.chunk_size: Any = chunk_size
        self.pause = pause
        self.timeout = timeout
        self.postgres_conn_id = postgres_conn_id
        self._connection: psycopg.Connection[Any] | None = None
        self._stop = Stop()
        self._done: lineage.Backfilled | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns the number of rows that were looked at, by table."""
        looked_at = {}
        hook = PgChangeHook(self.postgres_conn_id)
        with hook.get_conn(primary=True) as connection:
            connection.add_notice_handler(lambda notice: self.log.warning("%s", notice.message_primary))
            self._connection = connection
            for table in self.tables:
                self.log.info(
                    "backfilling %s into tube %s in the order of %s",
                    table,
                    self.tube,
                    self.order_col or "its ids",
                )
                done = tubes.backfill(
                    connection,
                    self.tube,
                    table,
                    self.order_col,
                    shard=self.shard,
                    chunk_size=self.chunk_size,
                    pause=self.pause,
                    timeout=self.timeout,
                    on_progress=telling(self.log.info, table),
                    stop=self._stop,
                )
                looked_at[table] = done.looked_at
            if lineage.is_on():
                self._done = lineage.backfilled(hook.conninfo(), connection, self.tube, self.tables)
        return looked_at

    def get_openlineage_facets_on_complete(self, task_instance: object) -> Lineage | None:
        """The tables, and the workers of the tube, which replay them."""
        if self._done is None:
            return None
        from airflow_pgchange.utils import openlineage  # noqa: PLC0415

        return openlineage.of_backfills(self._done, self.postgres_conn_id)

    def on_kill(self) -> None:
        """Stop at once, and undo what is in work: a chunk, with which the next run goes on."""
        self._stop.ask()
        if self._connection is not None:
            cancel(self._connection)
