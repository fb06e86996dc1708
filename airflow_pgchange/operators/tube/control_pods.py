"""Control pods of tubes, worked off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from airflow_pgchange import tubes
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.checks import Seconds
from airflow_pgchange.feeds.feed import to_json
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.tube.backfill import telling
from airflow_pgchange.tubes import Downstream, TableDownstream
from airflow_pgchange.tubes.control_pods import BACKFILL_SECONDS
from airflow_pgchange.utils.arguments import CheckedArguments, FeedLike, checks, feed_of

if TYPE_CHECKING:
    from airflow.sdk import Context


@dataclass(frozen=True)
class _Given:
    """A callable among what is rendered: Airflow would call it."""

    call: Downstream


def _downstream(name: str, value: Any) -> str | _Given:
    if not isinstance(value, str | _Given) and not callable(value):
        raise InvalidArgument(f"{name} is the name of a table or a callable, not {value!r}")
    return _Given(value) if callable(value) else value


def _tube_feed(name: str, value: Any) -> Mapping[str, Any]:
    feed = feed_of(value)
    if not isinstance(feed, TubeFeed):
        raise InvalidArgument(f"{feed.name} is a {feed.kind} feed, and this is about tubes")
    return to_json(feed)


class TubeGarbageCollectOperator(CheckedArguments, BaseOperator):
    """Works off control pods: carries out the backfills that ``tube.tube_backfill_schedule`` asked for, and gives up
    downstream what is gone, behind a backfill what it did not write again, and what was truncated.

    What the downstream names is touched, so the worker reads it anew and deletes what is gone. Exactly once: touches and
    the end of the control pod are one transaction. A control pod that can never be worked off is taken away, with a line
    in the log and a row in ``tube.fault``; one that fails for now fails the task when all others are done: the first such
    error is raised. Raises ConsumerBusy while the worker is at work for longer than ``busy_timeout``, Stopped when the
    task is killed.

    :param feed: the worker's feed, or its JSON (templated)
    :param downstream: the table that is a copy, as ``schema.table``, in which ``{tube}`` and ``{table}`` stand for the
        names of the tube and of the table that was copied (templated); or a callable that gets a
        ``airflow_pgchange.tubes.Control`` and returns the ids that it holds and was asked to give up. A callable gets
        control pods of other types too, and does itself what these ask for; a table cannot, so they are taken away
    :param key: the copy's column of ids; default: called as the source's (templated)
    :param backfill_timeout: how long scheduled backfills may take in a run; one that takes longer goes on in the next
        (templated)
    :param postgres_conn_id: the database of the downstream table
    :param source_conn_id: the database of the tube; default: the same
    :param busy_timeout: how long to wait for the worker; None: as long as it takes (templated)
    :param skip_if_empty: skip the task where no control pod's turn has come
    """

    arguments = checks(
        "key",
        "backfill_timeout",
        "postgres_conn_id",
        "source_conn_id",
        "busy_timeout",
        feed=_tube_feed,
        downstream=_downstream,
    )
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}
    shallow_copy_attrs: Sequence[str] = ("downstream",)

    def __init__(
        self,
        *,
        feed: FeedLike,
        downstream: str | Downstream,
        key: str | None = None,
        backfill_timeout: Seconds = BACKFILL_SECONDS,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        busy_timeout: Seconds | None = None,
        skip_if_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.feed = feed
        self.downstream: Any = downstream
        self.key = key
        self.backfill_timeout = backfill_timeout
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.busy_timeout = busy_timeout
        self.skip_if_empty = skip_if_empty
        self._stop = Stop()

    def execute(self, context: Context) -> dict[str, int]:
        """Returns how many control pods were worked off, how many ids they touched, and how many were given up."""
        feed = cast(TubeFeed, feed_of(self.feed))
        results = PgChangeHook(self.postgres_conn_id).conninfo()
        source = PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else results
        downstream = (
            TableDownstream(results, source, feed, self.downstream, self.key)
            if isinstance(self.downstream, str)
            else self.downstream.call
        )
        done = tubes.work_off(
            feed,
            source,
            downstream,
            busy_timeout=self.busy_timeout,
            backfill_timeout=self.backfill_timeout,
            on_progress=telling(self.log.info, feed.tube),
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
