"""Sagas: starting them, and working off their messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

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
    """Starts a saga: posts its steps and, behind its bung, their compensations, all in one transaction.

    Guarantee: at least once. A task that is tried again after it had committed starts another saga.

    :param saga: the saga; its queues are there (``airflow_pgchange.messages.create_saga_queues``)
    :param data: what every handler is told: texts or None by name (templated)
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
        """Returns the number of the saga, as ``mbus.sagas`` shows it."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            number = start_saga(connection, self.saga, self.data)
        self.log.info("saga %s %d has begun", self.saga.name, number)
        return number


class SagaHandlerOperator(FeedOperator):
    """Works off the messages of sagas that are in one queue, each in a transaction of its own, until none is ready.

    ``do(work, connection)`` does a step, or undoes it: ``work`` says which. It answers None when it is done,
    ``TryAgain(reason, delay)`` or ``RollBack(reason)``; what it wrote through ``connection`` is kept in the first case
    alone. Where it raises, the message is tried again after a minute, and the task fails once it has worked off the
    others. Several tasks may work off one queue at once. It does not wait for what is tried again later, nor for the
    steps behind: schedule its DAG by ``airflow_pgchange.assets.saga_schedule``, and it runs whenever one is due.

    Guarantee: each step is done once and before those that come after it, or not at all; once a saga is rolled back, each
    compensation is done once. For what is done through ``connection``, that is; what is done elsewhere may be done again
    after a crash.

    :param queue_name: the queue; ``queue`` is Airflow's own, of its executor
    :param do: the callable; None for the queues of the ends, where there is nothing to do but to note it
    :param consumer: the queue's consumer
    :param max_attempts: roll a saga back instead of trying a step again, the last time being this one, however the tries
        ended, also by the death of their process; None: never, but for the saga's deadline
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
        """The handler, as it is called in a run with this context."""
        return self.do

    def _plan(self, feed: Feed) -> Plan:
        """A saga's last attempt rolls it back: the message itself is received however often."""
        return replace(super()._plan(feed), max_attempts=None)

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns what the batch operators return, and under ``answers`` how many messages were ``done``, are tried
        ``again``, ``rolled back`` their saga, or were ``over``. Raises AirflowException where any ``failed``."""
        self._answers = Counter()
        done = {**super().execute(context), "answers": dict(self._answers)}
        if failed := self._answers["failed"]:
            raise AirflowException(
                f"{done['feed']}: {failed} of {done['changes']} messages failed, as logged above, and are tried again"
            )
        return done


def _nothing(work: Work, connection: psycopg.Connection[Any]) -> None:
    """There is nothing to do but to note that it is done."""
