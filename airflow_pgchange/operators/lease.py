"""The common base of the operators of detached batches: a claim with a lease, which waits without a worker slot, and an
ack."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.providers.common.compat.sdk import conf

from airflow_pgchange import detached
from airflow_pgchange.assets.targets import add_events, aliases
from airflow_pgchange.detached import Handle
from airflow_pgchange.feeds.argument_checks import Seconds, patience
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.draining import Drained, drain
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.operators.claim import ClaimingOperator, ConsumerOperator, task_of
from airflow_pgchange.results.staging import Result
from airflow_pgchange.sensors.feed import unless_error
from airflow_pgchange.triggers.feed import IdleTrigger
from airflow_pgchange.utils import metrics
from airflow_pgchange.utils.arguments import Check, checks
from airflow_pgchange.utils.outcome import Outcome

if TYPE_CHECKING:
    from airflow.sdk import Context

LEASE = "1 hour"
"""The default of ``lease``. An application that uses ``batch_job(handle)`` renews the lease while it runs. So the length
matters only if all tasks of a batch were lost: then it is the time until the batch is claimed again."""
Write = Callable[[Batch, psycopg.Connection[Any]], Sequence[Result]]


class LeasingOperator(ClaimingOperator):
    """Claims a batch with a lease.

    :param lease: how long the batch is not claimed again, unless the lease is renewed
    :param deferrable: wait for a busy consumer in the triggerer; default: the value of ``[operators]
        default_deferrable``
    """

    arguments: ClassVar[Mapping[str, Check]] = {**ClaimingOperator.arguments, **checks("lease")}
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        lease: Seconds = LEASE,
        deferrable: bool = conf.getboolean("operators", "default_deferrable"),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lease: Any = lease
        self.deferrable = deferrable
        self._waits_until: float | None = None

    def resume_claim(self, context: Context, event: dict[str, Any], ends_at: float | None = None) -> Any:
        """Go on after a wait for the consumer. Another run may have been faster: then wait again."""
        unless_error(event)
        self._waits_until = ends_at
        return self.execute(context)

    def _claim(self, feed: Feed, context: Context) -> tuple[Handle | None, Drained]:
        """Claim the next batch. Return None if nothing is ready, or if the consumer is busy and the task does not
        wait."""
        handles: list[Handle] = []

        def keep(transaction: ConsumerTransaction, batch: Batch) -> None:
            self._tell_of_batch(feed, batch)
            handles.append(Handle.of(feed, batch, self.lease))

        plan = self._plan(feed, context)
        waits = self.deferrable and plan.on_busy == "wait"
        done = drain(
            replace(
                plan,
                lease=self.lease,
                owner="/".join(task_of(context)) or self.task_id,
                on_busy="skip" if waits else plan.on_busy,
            ),
            keep,
            stopped=self._stop,
            given_up=lambda letter: self._tell_of_letter(feed, letter),
        )
        if not handles and done.busy and waits:
            self._wait(feed)
        return handles[0] if handles else None, done

    def _wait(self, feed: Feed) -> None:
        """Defer until nobody works on the consumer."""
        ends_at = self._waits_until
        if ends_at is None:
            busy_timeout = patience("busy_timeout", self.busy_timeout)
            ends_at = math.inf if busy_timeout is None else time.time() + busy_timeout
        self.log.info("%s is at work in another run: waiting without a worker slot", feed.name)
        self.defer(
            trigger=IdleTrigger(feed, self.postgres_conn_id, self.source_conn_id),
            method_name="resume_claim",
            kwargs={"ends_at": None if ends_at == math.inf else ends_at},
            timeout=None if ends_at == math.inf else timedelta(seconds=max(0.0, ends_at - time.time())),
        )


def ack_batch(operator: ConsumerOperator, handle: Handle, context: Context, write: Write) -> bool:
    """Ack a batch in one short transaction, and report it. False if it was acked before."""
    results, source = operator._conninfos()
    outcome, outlets = Outcome(handle.feed), aliases(operator.outlets)

    def write_all(batch: Batch, connection: psycopg.Connection[Any]) -> None:
        staged = write(batch, connection)
        if outlets:
            outcome.acked(connection, staged)

    batch = detached.finish(handle, results, source, write_all, stopped=operator._stop)
    if batch is None:
        operator.log.info("%s: batch %s is already acked", handle.feed.name, handle.batch_id)
        return False
    outcome.committed(batch)
    metrics.report_batch(handle.feed.name, batch.count, sum(batch.seconds.values()), batch.seconds)
    add_events(context, outlets, results, outcome)
    return True
