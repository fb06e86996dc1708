"""What the batch operators have in common: their arguments, and batch after batch until they have done
enough.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException
from airflow.sdk.log import redact  # type: ignore[attr-defined]

from airflow_pgchange import metrics
from airflow_pgchange.arguments import FeedLike, Seconds, feed_of, json_of, patience
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.checks import OnBusy, OnGiveUp, check_on_give_up, check_plan
from airflow_pgchange.feeds.connect import connect
from airflow_pgchange.feeds.draining import Drained, Plan, drain
from airflow_pgchange.feeds.errors import PgChangeError, Stopped
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.lag import lag
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.stopping import Stop

if TYPE_CHECKING:
    from airflow.sdk import Context


class DrainingOperator(BaseOperator):
    """Claims batches of a feed and commits each with its results; subclasses say how a batch is processed.

    :param feed: the feed, or its JSON (templated)
    :param postgres_conn_id: the database that holds the results and the consumer's progress
    :param source_conn_id: the database that holds the changes; default: the same. Its connection may name
        several servers of one group
    :param limit: changes a batch, at most
    :param max_batches: batches a run, at most; None: until nothing is ready
    :param on_busy: while another run works on this feed: ``wait`` for it, ``skip`` the task, or ``fail``
    :param wait_for: how long to wait for it, with ``wait``: seconds, or a timedelta; None: as long as it takes
    :param max_attempts: do not try a batch again that has failed so often; None: always try
    :param on_give_up: what becomes of it then: ``fail`` the task until a person has mended it or skipped it, or
        ``dead_letter``: put it among the dead letters with its last error, and go on with the next
    :param skip_if_empty: skip the task where nothing is ready; otherwise it succeeds with zero batches
    """

    template_fields: Sequence[str] = ("feed", "postgres_conn_id", "source_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}

    def __init__(
        self,
        *,
        feed: FeedLike,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        limit: int = 100_000,
        max_batches: int | None = 1,
        on_busy: OnBusy = "wait",
        wait_for: Seconds | None = None,
        max_attempts: int | None = None,
        on_give_up: OnGiveUp = "fail",
        skip_if_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_plan(on_busy, limit=limit, max_batches=max_batches, max_attempts=max_attempts)
        check_on_give_up(on_give_up, max_attempts)
        self.feed = json_of(feed)
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.limit = limit
        self.max_batches = max_batches
        self.on_busy = on_busy
        self.wait_for = patience("wait_for", wait_for)
        self.max_attempts = max_attempts
        self.on_give_up = on_give_up
        self.skip_if_empty = skip_if_empty
        self._transaction: ConsumerTransaction | None = None
        self._stop = Stop()

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        """Process one batch and ack it on the transaction."""
        raise NotImplementedError

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns ``{feed, batches, changes, batch_ids, seconds, busy, letters}``, with the latest twenty ids.

        ``letters`` are the dead letters of the batches that were given up on the way.
        """
        feed = feed_of(self.feed)
        plan = self._plan(feed)

        def process(transaction: ConsumerTransaction, batch: Batch) -> None:
            self._transaction = transaction
            self.log.info(
                "%s: batch %s, attempt %d, %d changes since %s",
                feed.name,
                batch.id,
                batch.attempt,
                batch.count,
                batch.oldest,
            )
            try:
                self.process_batch(transaction, batch, context)
            except Exception as error:
                if self._stop():
                    raise Stopped(
                        f"{feed.name}: the task was killed, and nothing of its batch was kept"
                    ) from error
                self._tell_of_failure(feed, batch)
                raise

        def committed(batch: Batch, seconds: float) -> None:
            metrics.report_batch(feed.name, batch.count, seconds)
            self.log.info("%s: batch %s committed after %.1f s", feed.name, batch.id, seconds)

        def given_up(letter: int) -> None:
            self.log.error(
                "%s: a batch was given up, and is dead letter %d. Once mended, send it again with: "
                "airflow pgchange letters redrive %d --conn-id %s%s",
                feed.name,
                letter,
                letter,
                *self._databases(feed),
            )

        try:
            drained = drain(plan, process, committed, stopped=self._stop, given_up=given_up)
        finally:
            self._transaction = None
        self._report_lag(plan)
        return self._conclude(feed, drained)

    def on_kill(self) -> None:
        """End what runs on the consumer's connection; nothing of the batch is kept."""
        self._stop.ask()
        if self._transaction is not None:
            self._transaction.cancel()

    def _plan(self, feed: Feed) -> Plan:
        return Plan(
            feed,
            PgChangeHook(self.postgres_conn_id).conninfo(),
            PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else None,
            limit=self.limit,
            max_batches=self.max_batches,
            on_busy=self.on_busy,
            wait_for=self.wait_for,
            max_attempts=self.max_attempts,
            on_give_up=self.on_give_up,
            hide=lambda text: str(redact(text)),
        )

    @property
    def _source_option(self) -> str:
        """How the command line is told of another database with the changes."""
        return f" --source-conn-id {self.source_conn_id}" if self.source_conn_id else ""

    def _databases(self, feed: Feed) -> tuple[str, str]:
        """Where the letters of the feed are, and what else the command line is to be told."""
        if feed.progress == "source":
            return self.source_conn_id or self.postgres_conn_id, ""
        return self.postgres_conn_id, self._source_option

    def _tell_of_failure(self, feed: Feed, batch: Batch) -> None:
        if self.on_give_up == "dead_letter" and batch.attempt >= (self.max_attempts or 0):
            return
        self.log.error(
            "%s: attempt %d on batch %s failed; nothing of it was kept, and it is tried again as the same "
            "batch. If it cannot be processed, give it up with: "
            "airflow pgchange skip %s --conn-id %s%s --reason '...'",
            feed.name,
            batch.attempt,
            batch.id,
            shlex.quote(feed.name),
            self.postgres_conn_id,
            self._source_option,
        )

    def _report_lag(self, plan: Plan) -> None:
        """What cannot be reported fails nothing: the batches are committed."""
        if not metrics.are_on():
            return
        try:
            with ExitStack() as opened:
                results = opened.enter_context(connect(plan.results, primary=True))
                source = results if plan.source is None else opened.enter_context(connect(plan.source))
                metrics.report_lag(plan.feed.name, lag(results, source, plan.feed, plan.limit))
        except (PgChangeError, psycopg.Error) as error:
            self.log.warning("%s: no metrics of the lag: %s", plan.feed.name, error)

    def _conclude(self, feed: Feed, drained: Drained) -> dict[str, Any]:
        if drained.busy and not drained.batches:
            raise AirflowSkipException(f"{feed.name} is at work in another run")
        if not drained.batches and self.skip_if_empty:
            raise AirflowSkipException(f"{feed.name}: nothing is ready")
        self.log.info(
            "%s: %d changes, batches: %d, %.1f s",
            feed.name,
            drained.changes,
            drained.batches,
            drained.seconds,
        )
        return {"feed": feed.name, **drained.summary()}
