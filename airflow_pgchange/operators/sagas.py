"""Sagas: starting them, and working off their messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.checks import check_plan
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.draining import DrainingOperator
from airflow_pgchange.queues import Texts
from airflow_pgchange.sagas import Saga, handle, start
from airflow_pgchange.sagas.handling import Do, Work

if TYPE_CHECKING:
    from airflow.sdk import Context


class StartSagaOperator(BaseOperator):
    """Starts a saga: posts its steps and, behind its bung, their compensations, all in one transaction.

    Guarantee: at least once. A task that is tried again after it had committed starts another saga.

    :param saga: the saga; its queues are there (``airflow_pgchange.sagas.create_queues``)
    :param data: what every handler is told: texts or None by name (templated)
    :param postgres_conn_id: the database of the queues
    """

    template_fields: Sequence[str] = ("data", "postgres_conn_id")
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
        if not isinstance(self.data, Mapping):
            raise InvalidArgument(f"{self.task_id}: data must be texts by name, not {self.data!r}")
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            number = start(connection, self.saga, self.data)
        self.log.info("saga %s %d has begun", self.saga.name, number)
        return number


class SagaHandlerOperator(DrainingOperator):
    """Works off the messages of sagas that are in one queue, each in a transaction of its own, until none is ready.

    ``do(work, connection)`` does a step, or undoes it: ``work`` says which. It answers None when it is done,
    ``TryAgain(reason, after)`` or ``RollBack(reason)``; what it wrote through ``connection`` is kept in the first case
    alone. Where it raises, the message is tried again after a minute, and the task fails once it has worked off the
    others. Several tasks may work off one queue at once. It does not wait for what is tried again later, nor for the
    steps behind: schedule its DAG by ``airflow_pgchange.assets.sagas.saga_schedule``, and it runs whenever one is due.

    Guarantee: each step is done once and before those that come after it, or not at all; once a saga is rolled back, each
    compensation is done once. For what is done through ``connection``, that is; what is done elsewhere may be done again
    after a crash.

    :param queue: the queue
    :param do: the callable; None for the queues of the ends, where there is nothing to do but to note it
    :param consumer: the queue's consumer
    :param max_tries: roll a saga back instead of trying a step again, the last time being this one, however the tries
        ended, also by the death of their process; None: never, but for the saga's deadline
    """

    shallow_copy_attrs: Sequence[str] = ("do",)

    def __init__(
        self,
        *,
        queue: str,
        do: Do | None = None,
        consumer: str = "default",
        max_tries: int | None = None,
        max_batches: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(feed=QueueFeed(queue, consumer), limit=1, max_batches=max_batches, **kwargs)
        check_plan(self.on_busy, max_tries=max_tries)
        if self.source_conn_id is not None:
            raise InvalidArgument(
                f"{self.task_id}: a saga is handled in the database of its queues, which is postgres_conn_id, "
                "in one transaction: leave source_conn_id out"
            )
        self.do = do or _nothing
        self.max_tries = max_tries
        self._answers: Counter[str] = Counter()

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        (change,) = transaction.changes()
        answers: list[str] = []
        transaction.ack(
            lambda connection: answers.append(handle(connection, change, self.do, max_tries=self.max_tries))
        )
        self._answers[answers[-1]] += 1

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
