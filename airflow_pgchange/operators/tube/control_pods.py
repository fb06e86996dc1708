"""The operator that processes the control pods of tubes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow.providers.common.compat.sdk import AirflowSkipException, BaseOperator

from airflow_pgchange import tubes
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds
from airflow_pgchange.feeds.feed_kinds import to_json
from airflow_pgchange.feeds.key_columns import KeyNames
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.tube.backfill import telling
from airflow_pgchange.tubes import Downstream, TableDownstream
from airflow_pgchange.tubes.control_pods import BACKFILL_SECONDS
from airflow_pgchange.utils.arguments import CheckedArguments, FeedLike, checks, columns, feed_of, maybe

if TYPE_CHECKING:
    from airflow.sdk import Context


@dataclass(frozen=True)
class _WrappedCallable:
    """Wraps a callable among the template fields, because Airflow would call a bare callable."""

    call: Downstream


def _downstream(name: str, value: Any) -> str | _WrappedCallable:
    if not isinstance(value, str | _WrappedCallable) and not callable(value):
        raise InvalidArgument(f"{name} must be the name of a table or a callable, not {value!r}")
    return _WrappedCallable(value) if callable(value) else value


def tube_feed(name: str, value: Any) -> Mapping[str, Any]:
    """Return the JSON of a TubeFeed. Raises InvalidArgument for another feed."""
    feed = feed_of(value)
    if not isinstance(feed, TubeFeed):
        raise InvalidArgument(
            f"{name}: {feed.name} is a {feed.kind} feed, and not of a tube: give a TubeFeed"
        )
    return to_json(feed)


class TubeGarbageCollectOperator(CheckedArguments, BaseOperator):
    """Processes the control pods of a tube's worker: scheduled backfills, and rows of the downstream that must be
    checked.

    It runs the backfills that ``tube.tube_backfill_schedule`` has requested. After a backfill or a truncate it asks the
    downstream for ids that may be gone at the source. These are ids that the backfill has not written again, or the ids
    of the truncated table. It touches these ids, so that the worker reads them again and deletes those that are gone.

    Guarantee: exactly once, because the touches and the deletion of the control pod are one transaction. A control pod
    that can never be processed is deleted, with a log line and a row in ``tube.fault``. If a pod fails otherwise, the
    task processes the rest, and then raises the first error. Raises ConsumerBusy if the worker is busy for longer than
    ``busy_timeout``, Stopped if the task is killed.

    :param feed: the worker's feed, or its JSON (templated)
    :param downstream: the table that is the copy or the report, as ``schema.table``. In the name of a copy ``{tube}`` and
        ``{table}`` stand for the names of the tube and of the copied table (templated). Or a callable that takes a
        ``airflow_pgchange.tubes.Control`` and returns the ids that it holds and that may be gone. A callable also gets
        control pods of other types, and carries them out itself. With a table they are deleted
    :param key: the column of ids in that table, or the list of its columns; default: the names of the source's columns
        (templated)
    :param backfill_timeout: how long scheduled backfills may take in a run; the next run continues a longer one
        (templated)
    :param postgres_conn_id: the database of the downstream table
    :param source_conn_id: the database of the tube; default: the same
    :param busy_timeout: how long to wait for the worker; None: as long as it takes (templated)
    :param skip_if_empty: skip the task if no control pod is due
    """

    arguments = checks(
        "backfill_timeout",
        "postgres_conn_id",
        "source_conn_id",
        "busy_timeout",
        feed=tube_feed,
        downstream=_downstream,
        key=maybe(columns),
    )
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}
    shallow_copy_attrs: Sequence[str] = ("downstream",)

    def __init__(
        self,
        *,
        feed: FeedLike,
        downstream: str | Downstream,
        key: KeyNames | None = None,
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
        self.key: Any = key
        self.backfill_timeout = backfill_timeout
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.busy_timeout = busy_timeout
        self.skip_if_empty = skip_if_empty
        self._stop = Stop()

    def execute(self, context: Context) -> dict[str, int]:
        """Return the numbers of control pods that were processed (``controls``) and given up, and of ids that were
        touched."""
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
                    "%s: processed %s of %s, touched %d ids",
                    feed.name,
                    one.control.type,
                    one.control.table,
                    one.touched,
                )
        if not done:
            nothing = f"{feed.name}: no control pod is due"
            if self.skip_if_empty:
                raise AirflowSkipException(nothing)
            self.log.info(nothing)
        given_up = sum(one.given_up is not None for one in done)
        touched = sum(one.touched for one in done)
        return {"controls": len(done) - given_up, "touched": touched, "given_up": given_up}

    def on_kill(self) -> None:
        """Stop after the current chunk. The next run continues the backfill there. All control pods stay, and
        their touches are rolled back."""
        self._stop.ask()
