"""What the batch operators have in common: their arguments, and batch after batch until they have done
enough.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import psycopg
from airflow.sdk import BaseOperator, BaseOperatorLink, conf
from airflow.sdk.exceptions import AirflowSkipException
from airflow.sdk.log import redact  # type: ignore[attr-defined]

from airflow_pgchange.assets.targets import aliases, table_asset
from airflow_pgchange.errors import PgChangeError, Stopped
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.checks import BATCH_LIMIT, OnBusy, OnGiveUp, Seconds, Until, check_give_up
from airflow_pgchange.feeds.connections import both
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.draining import Drained, Plan, drain
from airflow_pgchange.feeds.error_text import described
from airflow_pgchange.feeds.errors import is_of_the_batch
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.page_link import ConsumerLink
from airflow_pgchange.results.staging import Staged
from airflow_pgchange.utils import lineage, metrics
from airflow_pgchange.utils.arguments import CheckedArguments, FeedLike, Number, checks, feed_of
from airflow_pgchange.utils.outcome import Outcome

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_pgchange.utils.openlineage import Lineage


MANY_ATTEMPTS = 3
"""So often a batch fails before a person hears how to give it up, as in health; where ``max_attempts`` does not say."""


CONSUMER = ConsumerLink()


def _run(context: Context) -> str | None:
    """The try of the task that works, as the page reads it."""
    ti = context.get("ti")
    if ti is None:
        return None
    parts = (ti.dag_id, ti.run_id, ti.task_id, ti.map_index, ti.try_number)
    return "/".join(quote(str(part), safe="") for part in parts)


class FeedOperator(CheckedArguments, BaseOperator):
    """Claims batches of a feed and commits each with its results; subclasses say how a batch is processed.

    All but ``skip_if_empty`` can be templated. With an outlet of ``airflow_pgchange.target_tables`` each
    table that a batch wrote is an asset, for other DAGs to be scheduled on.

    :param feed: the feed, or its JSON
    :param postgres_conn_id: the database that holds the results and the consumer's progress
    :param source_conn_id: the database that holds the changes; default: the same. Its connection may name
        several servers of one group
    :param limit: changes a batch, at most
    :param max_batches: batches a run, at most; None: as many as there are
    :param until: ``empty``: until nothing is ready; or so long, in which batches are waited for and served as they
        come, up to ``max_batches``: one that has begun is finished
    :param idle_timeout: end once nothing was ready for so long; None: at once with ``empty``, else never
    :param on_busy: while another run works on this feed: ``wait`` for it, ``skip`` the task, or ``fail``
    :param busy_timeout: how long to wait for it, with ``wait``; None: as long as it takes
    :param max_attempts: do not try a batch again that has failed so often; None: always try
    :param on_give_up: what becomes of it then: ``fail`` the task until a person has mended it or skipped it, or
        ``dead_letter``: put it among the dead letters with its last error, and go on with the next
    :param skip_if_empty: skip the task where nothing is ready; otherwise it succeeds with zero batches
    """

    arguments = checks(
        "feed",
        "postgres_conn_id",
        "source_conn_id",
        "limit",
        "max_batches",
        "until",
        "idle_timeout",
        "on_busy",
        "busy_timeout",
        "max_attempts",
        "on_give_up",
    )
    template_fields: Sequence[str] = tuple(arguments)
    operator_extra_links: Collection[BaseOperatorLink] = (CONSUMER,)
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}

    def __init__(
        self,
        *,
        feed: FeedLike,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        limit: Number = BATCH_LIMIT,
        max_batches: Number | None = 1,
        until: Until = "empty",
        idle_timeout: Seconds | None = None,
        on_busy: OnBusy = "wait",
        busy_timeout: Seconds | None = None,
        max_attempts: Number | None = None,
        on_give_up: OnGiveUp = "fail",
        skip_if_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_give_up(on_give_up, max_attempts)
        self.feed = feed
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.limit: Any = limit
        self.max_batches: Any = max_batches
        self.until: Any = until
        self.idle_timeout = idle_timeout
        self.on_busy = on_busy
        self.busy_timeout = busy_timeout
        self.max_attempts: Any = max_attempts
        self.on_give_up = on_give_up
        self.skip_if_empty = skip_if_empty
        self._transaction: ConsumerTransaction | None = None
        self._stop = Stop()
        self._done: tuple[Plan, Outcome] | None = None
        self._staged: Sequence[Staged] = ()

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        """Process one batch and ack it on the transaction."""
        raise NotImplementedError

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns ``{feed, batches, changes, batch_ids, seconds, busy, letters}``, with the latest twenty ids.

        ``letters`` are the dead letters of the batches that were given up on the way.
        """
        feed = feed_of(self.feed)
        plan = replace(self._plan(feed), run=_run(context))
        outcome, outlets, told = Outcome(feed), aliases(self.outlets), lineage.is_on()
        self._done = (plan, outcome) if told else None

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
                with transaction.progress.told(partial(self.log.info, "%s: %s", feed.name)):
                    self.process_batch(transaction, batch, context)
                if outlets or told:
                    outcome.acked(transaction, self._staged)
            except Exception as error:
                if self._stop():
                    raise Stopped(
                        f"{feed.name}: the task was killed, and nothing of its batch was kept"
                    ) from error
                self._tell_of_failure(plan, batch, error)
                raise

        def committed(batch: Batch, seconds: float) -> None:
            outcome.committed(batch)
            metrics.report_batch(feed.name, batch.count, seconds, batch.seconds)
            phases = ", ".join(f"{phase} {took:.2f}" for phase, took in batch.seconds.items())
            self.log.info("%s: batch %s committed after %.1f s: %s", feed.name, batch.id, seconds, phases)

        def given_up(letter: int) -> None:
            self.log.error(
                "%s: a batch was given up, and is dead letter %d. Once mended, send it again with: "
                "airflow pgchange letters redrive %d --postgres-conn-id %s%s",
                feed.name,
                letter,
                letter,
                *self._databases(feed),
            )

        if told:
            outcome.sources = lineage.sources(feed, plan.source or plan.results)
        try:
            drained = drain(plan, process, committed, stopped=self._stop, given_up=given_up)
        finally:
            self._transaction = None
        for outlet in outlets:
            for target in sorted(outcome.targets):
                context["outlet_events"][outlet].add(table_asset(plan.results, *target), outcome.summary())
        self._report_lag(plan)
        return self._conclude(feed, drained)

    def on_kill(self) -> None:
        """End what runs on the consumer's connection; nothing of the batch is kept."""
        self._stop.ask()
        if self._transaction is not None:
            self._transaction.cancel()

    def get_openlineage_facets_on_complete(self, task_instance: object) -> Lineage | None:
        """The feed, its tables, the tables that were written, and how many changes in which batches; also of a task that
        failed behind those that it committed."""
        if self._done is None:
            return None
        from airflow_pgchange.utils import openlineage  # noqa: PLC0415

        plan, outcome = self._done
        return openlineage.of_batches(
            outcome, self.postgres_conn_id, plan.source or plan.results, plan.results
        )

    def _plan(self, feed: Feed) -> Plan:
        return Plan(
            feed,
            PgChangeHook(self.postgres_conn_id).conninfo(),
            PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else None,
            limit=self.limit,
            max_batches=self.max_batches,
            until=self.until,
            idle_timeout=self.idle_timeout,
            on_busy=self.on_busy,
            busy_timeout=self.busy_timeout,
            max_attempts=self.max_attempts,
            on_give_up=self.on_give_up,
            hide=lambda text: str(redact(text)),
            register=conf.getboolean("pgchange", "register_consumers", fallback=True),
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

    def _tell_of_failure(self, plan: Plan, batch: Batch, error: Exception) -> None:
        """Begins with the cause. Giving it up is only offered where trying again has not helped, and may not."""
        limit = self.max_attempts or MANY_ATTEMPTS
        if self.on_give_up == "dead_letter" and batch.attempt >= limit:
            return
        name, cause = plan.feed.name, plan.hide(described(error, (plan.results, plan.source or "")))
        self.log.error(
            "%s\n%s: attempt %d on batch %s failed on that; nothing of it was kept, and the next try is the same batch%s",
            cause,
            name,
            batch.attempt,
            batch.id,
            f". If it cannot be processed, give it up with: airflow pgchange skip {shlex.quote(name)} --postgres-conn-id "
            f"{self.postgres_conn_id}{self._source_option} --reason '...'"
            if batch.attempt >= limit and is_of_the_batch(error)
            else "",
        )

    def _report_lag(self, plan: Plan) -> None:
        """What cannot be reported fails nothing: the batches are committed."""
        if not metrics.are_on():
            return
        try:
            with both(plan.results, plan.source, primary=False) as (results, source):
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
