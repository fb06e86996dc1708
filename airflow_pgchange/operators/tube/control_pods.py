"""Control pods of tubes, worked off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from airflow_pgchange import tubes
from airflow_pgchange.arguments import FeedLike, Seconds, feed_of, json_of, patience, seconds
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.tube.backfill import telling
from airflow_pgchange.stopping import Stop
from airflow_pgchange.tubes import Downstream, TableDownstream
from airflow_pgchange.tubes.control_pods import BACKFILL_SECONDS

if TYPE_CHECKING:
    from airflow.sdk import Context


class TubeGarbageCollectOperator(BaseOperator):
    """Works off control pods: carries out the backfills that ``tube.tube_backfill_schedule`` asked for, and gives up
    downstream what is gone, behind a backfill what it did not write again, and what was truncated.

    What the downstream names is touched, so the worker reads it anew and deletes what is gone. Exactly once: touches and
    the end of the control pod are one transaction. A control pod that can never be worked off is taken away, with a line
    in the log and a row in ``tube.fault``; one that fails for now fails the task when all others are done: the first such
    error is raised. Raises ConsumerBusy while the worker is at work for longer than ``wait_for``, Stopped when the task
    is killed.

    :param feed: the worker's feed, or its JSON (templated)
    :param downstream: the table that is a copy, as ``schema.table``, in which ``{tube}`` and ``{table}`` stand for the
        names of the tube and of the table that was copied (templated); or a callable that gets a
        ``airflow_pgchange.tubes.Control`` and returns the ids that it holds and was asked to give up. A callable gets
        control pods of other types too, and does itself what these ask for; a table cannot, so they are taken away
    :param key: the copy's column of ids; default: called as the source's
    :param shard_column: the column of their shard, where the copy is of several tables' rows
    :param backfill_for: seconds a run, or a timedelta, for scheduled backfills; one that takes longer goes on in the
        next run
    :param postgres_conn_id: the database of the downstream table
    :param source_conn_id: the database of the tube; default: the same
    :param wait_for: how long to wait for the worker: seconds, or a timedelta; None: as long as it takes
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
        key: str | None = None,
        shard_column: str = "shard",
        backfill_for: Seconds = BACKFILL_SECONDS,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        wait_for: Seconds | None = None,
        skip_if_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.feed = json_of(feed)
        self.downstream = downstream
        self.key = key
        self.shard_column = shard_column
        self.backfill_for = seconds("backfill_for", backfill_for)
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.wait_for = patience("wait_for", wait_for)
        self.skip_if_empty = skip_if_empty
        self._stop = Stop()

    def execute(self, context: Context) -> dict[str, int]:
        """Returns how many control pods were worked off, how many ids they touched, and how many were given up."""
        feed = _tube_feed(self.feed)
        results = PgChangeHook(self.postgres_conn_id).conninfo()
        source = PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else results
        downstream = self.downstream
        if isinstance(downstream, str):
            downstream = TableDownstream(results, source, feed, downstream, self.key, self.shard_column)
        if not callable(downstream):
            raise InvalidArgument(f"downstream is the name of a table or a callable, not {downstream!r}")
        done = tubes.work_off(
            feed,
            source,
            downstream,
            wait=self.wait_for,
            seconds=self.backfill_for,
            told=telling(self.log.info, feed.tube),
            stopped=self._stop,
        )
        for one in done:
            if one.given_up is None:
                self.log.info(
                    "%s: %s of %s worked off, %d ids touched",
                    feed.name,
                    one.control.type,
                    one.control.table,
                    one.touched,
                )
        if not done:
            nothing = f"{feed.name}: no control pod's turn has come"
            if self.skip_if_empty:
                raise AirflowSkipException(nothing)
            self.log.info(nothing)
        given_up = sum(one.given_up is not None for one in done)
        touched = sum(one.touched for one in done)
        return {"controls": len(done) - given_up, "touched": touched, "given_up": given_up}

    def on_kill(self) -> None:
        """Stop behind the chunk in work: a backfill goes on there in the next run, and of the control pods all stay, with
        nothing touched for them."""
        self._stop.ask()


def _tube_feed(value: FeedLike) -> TubeFeed:
    feed = feed_of(value)
    if not isinstance(feed, TubeFeed):
        raise InvalidArgument(f"{feed.name} is a {feed.kind} feed, and this is about tubes")
    return feed
