"""The base of the batch operators: their arguments, and the loop over batches."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.providers.common.compat.sdk import AirflowSkipException

from airflow_pgchange.assets.targets import add_events, aliases
from airflow_pgchange.errors import PgChangeError, Stopped
from airflow_pgchange.feeds.argument_checks import Seconds, Until
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import both
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.draining import Drained, Plan, drain, goes_on
from airflow_pgchange.feeds.error_text import described
from airflow_pgchange.feeds.error_translation import is_of_the_batch
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.operators.claim import ClaimingOperator
from airflow_pgchange.results.staging import Result
from airflow_pgchange.utils import lineage, metrics
from airflow_pgchange.utils.arguments import Check, Number, checks, feed_of
from airflow_pgchange.utils.outcome import Outcome

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_pgchange.utils.openlineage import Lineage


MANY_ATTEMPTS = 3
"""Without ``max_attempts``: from this attempt on, the log says how to give up the batch. pgchange.health() uses the same
number."""


class FeedOperator(ClaimingOperator):
    """Claims batches of a feed and commits each with its results. A subclass defines how a batch is processed.

    All arguments but ``skip_if_empty`` can be templated. With an outlet of ``airflow_pgchange.target_tables`` each table
    that a batch wrote is an asset, on which other DAGs can be scheduled.

    :param feed: the feed, or its JSON
    :param postgres_conn_id: the database that holds the results and the consumer's progress
    :param source_conn_id: the database that holds the changes; default: the same. Its connection may name several servers
        of one group
    :param limit: the maximum of changes in a batch
    :param max_batches: the maximum of batches in a run; None: no maximum
    :param until: ``empty``: work until nothing is ready. Or a length of time, for which the task waits for batches and
        processes them, up to ``max_batches``; a batch that has begun is finished
    :param idle_timeout: end when nothing was ready for this long; None: with ``empty`` at once, otherwise never
    :param on_busy: if another run works on this feed: ``wait`` for it, ``skip`` the task, or ``fail``
    :param busy_timeout: how long ``wait`` waits for the other run; None: as long as it takes
    :param max_attempts: the number of failures after which a batch is not tried again; None: always try again
    :param on_give_up: what is done with such a batch. ``bisect``: if the batch itself caused the error, halve it until
        the bad change is alone. Make that change a dead letter with its last error, and continue. An outage never
        halves a batch. ``fail`` the task until a person has corrected the cause or skipped the batch. ``dead_letter``:
        make the whole batch a dead letter with its last error, and continue
    :param skip_if_empty: skip the task if nothing is ready; otherwise it succeeds with zero batches
    """

    arguments: ClassVar[Mapping[str, Check]] = {
        **ClaimingOperator.arguments,
        **checks("max_batches", "until", "idle_timeout"),
    }
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        max_batches: Number | None = 1,
        until: Until = "empty",
        idle_timeout: Seconds | None = None,
        skip_if_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.max_batches: Any = max_batches
        self.until: Any = until
        self.idle_timeout = idle_timeout
        self.skip_if_empty = skip_if_empty
        self._done: tuple[Plan, Outcome] | None = None
        self._staged: Sequence[Result] = ()

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        """Process one batch and ack it on the transaction."""
        raise NotImplementedError

    def execute(self, context: Context) -> dict[str, Any]:
        """Return ``{feed, batches, changes, batch_ids, seconds, busy, letters, splits, extra_attempts}``, with the ids of
        the last twenty batches.

        ``letters`` are the numbers of the dead letters that batches of this run became. ``splits`` are the ids of the
        batches that were split, and ``extra_attempts`` is the number of attempts on their parts.
        """
        feed = feed_of(self.feed)
        plan = self._plan(feed, context)
        outcome, outlets, has_lineage = Outcome(feed), aliases(self.outlets), lineage.is_on()
        self._done = (plan, outcome) if has_lineage else None

        def process(transaction: ConsumerTransaction, batch: Batch) -> None:
            self._transaction = transaction
            self._tell_of_batch(feed, batch)
            try:
                with transaction.progress.reported_to(partial(self.log.info, "%s: %s", feed.name)):
                    self.process_batch(transaction, batch, context)
                if outlets or has_lineage:
                    outcome.acked(transaction.connection, self._staged)
            except Exception as error:
                if self._stop():
                    raise Stopped(
                        f"{feed.name}: the task was killed, and its batch was rolled back"
                    ) from error
                if not (goes_on(plan, batch) and transaction.blames_batch(error)):
                    self._tell_of_failure(plan, batch, error)
                raise

        def committed(batch: Batch, seconds: float) -> None:
            outcome.committed(batch)
            metrics.report_batch(feed.name, batch.count, seconds, batch.seconds)
            phases = ", ".join(f"{phase} {took:.2f}" for phase, took in batch.seconds.items())
            self.log.info("%s: batch %s committed after %.1f s: %s", feed.name, batch.id, seconds, phases)

        def given_up(letter: int) -> None:
            self._tell_of_letter(feed, letter)

        if has_lineage:
            outcome.sources = lineage.sources(feed, plan.source or plan.results)
        try:
            drained = drain(plan, process, committed, stopped=self._stop, given_up=given_up)
        finally:
            self._transaction = None
        add_events(context, outlets, plan.results, outcome)
        self._report_lag(plan)
        return self._conclude(feed, drained)

    def get_openlineage_facets_on_complete(self, task_instance: object) -> Lineage | None:
        """Return the lineage: the feed, its tables, the tables that were written, and the committed batches with their
        numbers of changes. A task that failed after some batches has it, too."""
        if self._done is None:
            return None
        from airflow_pgchange.utils import openlineage  # noqa: PLC0415

        plan, outcome = self._done
        return openlineage.of_batches(
            outcome, self.postgres_conn_id, plan.source or plan.results, plan.results
        )

    def _plan(self, feed: Feed, context: Context) -> Plan:
        return replace(
            super()._plan(feed, context),
            max_batches=self.max_batches,
            until=self.until,
            idle_timeout=self.idle_timeout,
        )

    def _tell_of_failure(self, plan: Plan, batch: Batch, error: Exception) -> None:
        """Log the failure, with the cause first. Offer to give up the batch only if several retries have not helped and
        the cause may be in the batch."""
        limit = self.max_attempts or MANY_ATTEMPTS
        if self.on_give_up == "dead_letter" and batch.attempt >= limit:
            return
        name, cause = plan.feed.name, plan.hide(described(error, (plan.results, plan.source or "")))
        self.log.error(
            "%s\n%s: attempt %d on batch %s failed with this error; the batch was rolled back, and is tried again%s",
            cause,
            name,
            batch.attempt,
            batch.id,
            f". If it cannot be processed, give it up with: airflow-pgchange skip {shlex.quote(name)} --postgres-conn-id "
            f"{self.postgres_conn_id}{self._source_option} --reason '...'"
            if batch.attempt >= limit and is_of_the_batch(error)
            else "",
        )

    def _report_lag(self, plan: Plan) -> None:
        """Report the lag as metrics. An error here must not fail the task, because its batches are committed."""
        if not metrics.are_on():
            return
        try:
            with both(plan.results, plan.source, primary=False) as (results, source):
                metrics.report_lag(plan.feed.name, lag(results, source, plan.feed, plan.limit))
        except (PgChangeError, psycopg.Error) as error:
            self.log.warning("%s: the lag could not be reported as metrics: %s", plan.feed.name, error)

    def _conclude(self, feed: Feed, drained: Drained) -> dict[str, Any]:
        if drained.busy and not drained.batches:
            raise AirflowSkipException(f"{feed.name} is at work in another run")
        if not drained.batches and self.skip_if_empty:
            raise AirflowSkipException(f"{feed.name}: nothing is ready")
        self.log.info(
            "%s: %d changes, batches: %d, %.1f s%s",
            feed.name,
            drained.changes,
            drained.batches,
            drained.seconds,
            f"; {drained.extra_attempts} attempts on parts of {len(drained.splits)} batches that were split"
            if drained.splits
            else "",
        )
        return {"feed": feed.name, **drained.summary()}
