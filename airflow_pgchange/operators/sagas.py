"""Operators of sagas: start a saga, or handle the messages of sagas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.providers.common.compat.sdk import AirflowException, BaseOperator

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.draining import Plan
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.messages import Saga, handle_saga, start_saga
from airflow_pgchange.messages.queues import Texts
from airflow_pgchange.messages.saga_handling import Do, Work
from airflow_pgchange.operators.feed import FeedOperator
from airflow_pgchange.utils.arguments import CheckedArguments, Number, checks, function

if TYPE_CHECKING:
    from airflow.sdk import Context


class StartSagaOperator(CheckedArguments, BaseOperator):
    """Starts a saga: posts the messages of all steps and compensations in one transaction.

    The saga's bung, a message that nobody receives, holds the compensations back until the saga is rolled back.

    Guarantee: at least once. A task that is retried after its commit starts another saga.

    :param saga: the saga; its queues must exist (``airflow_pgchange.messages.create_saga_queues``)
    :param data: the data for every handler, a mapping of names to texts or None (templated)
    :param postgres_conn_id: the database of the queues
    """

    arguments = checks("data", "postgres_conn_id")
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"data": "json"}
    shallow_copy_attrs: Sequence[str] = ("saga",)

    def __init__(
        self,
        *,
        saga: Saga,
        data: Texts,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.saga = saga
        self.data = data
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> int:
        """Return the number of the saga, as ``mbus.sagas`` shows it."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            number = start_saga(connection, self.saga, self.data)
        self.log.info("started saga %s %d", self.saga.name, number)
        return number


class SagaHandlerOperator(FeedOperator):
    """Handles the messages of sagas in one queue until none is ready, each in a transaction of its own.

    ``do(work, connection)`` does a step, or undoes it, as ``work`` says. It returns None when the work is done, otherwise
    ``TryAgain(reason, delay)`` or ``RollBack(reason)``. Its writes through ``connection`` are kept only if it returns
    None. If it raises, the message is tried again after a minute, and the task fails after it has handled the other
    messages.

    Several tasks may handle one queue at once. The task does not wait for messages that are due later, nor for later
    steps. Schedule its DAG with ``airflow_pgchange.assets.saga_schedule``, so that it runs whenever a message is due.

    Guarantee, for writes through ``connection``: each step is done once, and before the steps that come after it, or not
    at all. If the saga is rolled back, each compensation is done once. Work in other systems may be repeated after a
    crash.

    :param queue_name: the queue. The argument ``queue`` is Airflow's own: the queue of its executor
    :param do: the callable; None for the queues ``end`` and ``rolled_back`` of a saga if there is nothing to do
    :param consumer: the queue's consumer
    :param max_attempts: roll the saga back if this attempt on a step does not succeed. Attempts whose process died count,
        too. None: try again until the saga's deadline
    """

    shallow_copy_attrs: Sequence[str] = ("do",)

    def __init__(
        self,
        *,
        queue_name: str,
        do: Do | None = None,
        consumer: str = "default",
        max_attempts: Number | None = None,
        max_batches: Number | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            feed=QueueFeed(queue_name, consumer),
            limit=1,
            max_batches=max_batches,
            max_attempts=max_attempts,
            on_give_up="fail",
            **kwargs,
        )
        if self.source_conn_id is not None:
            raise InvalidArgument(
                f"{self.task_id}: a saga is handled in the database of its queues, which is postgres_conn_id, "
                "in one transaction: leave source_conn_id out"
            )
        self.do = _nothing if do is None else function("do", do)
        self._answers: Counter[str] = Counter()

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        (change,) = transaction.changes()
        do = self.bound(context)
        answers: list[str] = []
        transaction.ack(
            lambda connection: answers.append(
                handle_saga(connection, change, do, max_attempts=self.max_attempts)
            )
        )
        self._answers[answers[-1]] += 1

    def bound(self, context: Context) -> Do:
        """Return the handler in the form in which a run with this context calls it."""
        return self.do

    def _plan(self, feed: Feed, context: Context) -> Plan:
        """Return the plan without a limit of attempts: ``max_attempts`` rolls the saga back, and does not give up the
        message."""
        return replace(super()._plan(feed, context), max_attempts=None)

    def execute(self, context: Context) -> dict[str, Any]:
        """Return the summary of a batch operator with ``answers``: the number of messages by their outcome, which is
        ``done``, ``again``, ``rolled back`` or ``over``. Raises AirflowException if any message ``failed``."""
        self._answers = Counter()
        done = {**super().execute(context), "answers": dict(self._answers)}
        if failed := self._answers["failed"]:
            raise AirflowException(
                f"{done['feed']}: {failed} of {done['changes']} messages failed, as logged above, and are tried again"
            )
        return done


def _nothing(work: Work, connection: psycopg.Connection[Any]) -> None:
    """Do nothing, so that the message is received as done."""
