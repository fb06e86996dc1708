"""The operator that backfills tubes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from airflow.sdk import BaseOperator

from airflow_pgchange import tubes
from airflow_pgchange.feeds.argument_checks import Seconds
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
"""Seconds between two log lines about a backfill."""


def telling(say: Callable[..., None], subject: str) -> Callable[[BackfillProgress], None]:
    """Return a function that logs the progress of backfills of ``subject``: the first chunk, the end, and at intervals in
    between."""
    logged_at: dict[int, float] = {}

    def log_progress(progress: BackfillProgress) -> None:
        if progress.finished:
            say(
                "backfill %d of %s is done: %s rows; the workers of the tube replay them now",
                progress.id,
                subject,
                f"{progress.looked_at:,}",
            )
        elif time.monotonic() - logged_at.get(progress.id, -math.inf) >= SAY_EVERY:
            logged_at[progress.id] = time.monotonic()
            say(
                "backfill %d of %s is %s: %s of about %s rows (%d %%)",
                progress.id,
                subject,
                progress.state,
                f"{progress.looked_at:,}",
                f"{progress.total:,}",
                min(99, 100 * progress.looked_at // max(progress.total, 1)),
            )

    return log_progress


class TubeBackfillOperator(CheckedArguments, BaseOperator):
    """Touches every row of attached tables. Workers replay these rows after all rows that are touched in the meantime.

    Each chunk is a transaction. If a run is killed, the next run continues with the same chunk. ``tube.backfills()``
    shows the progress. To backfill tables in parallel, map this operator over them. A table is refused while workers
    still replay its last backfill.

    Guarantee: at least once. Every row that exists from the beginning to the end is touched. A row that is touched
    twice does no harm. Raises InvalidArgument for no tables, a table that does not exist or an invalid number, and
    Refused if a backfill cannot begin. Raises ConsumerBusy if transactions that write a table do not end within
    ``timeout``. Raises Stopped if the task is killed or the backfill is cancelled.

    :param tube: the tube (templated)
    :param tables: the attached tables, as a list or separated by commas. Each is ``schema.table``; a part in double
        quotes may contain any character (templated)
    :param order_col: the column by which rows are ordered; default: their ids (templated)
    :param shard: the shard of the tables; default: the shard with which each is attached (templated)
    :param chunk_size: the number of rows in a chunk; a backfill that is continued keeps its first chunk size (templated)
    :param pause: the pause between two chunks (templated)
    :param timeout: how long a backfill waits at its beginning for transactions that write the table (templated)
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
        """Return the number of rows that were read, by table."""
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
        """Return the lineage: the tables, and the workers of the tube, which replay their rows."""
        if self._done is None:
            return None
        from airflow_pgchange.utils import openlineage  # noqa: PLC0415

        return openlineage.of_backfills(self._done, self.postgres_conn_id)

    def on_kill(self) -> None:
        """Stop at once, and roll back the current chunk. The next run continues with this chunk."""
        self._stop.ask()
        if self._connection is not None:
            cancel(self._connection)
