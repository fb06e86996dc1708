"""A batch for a Python callable."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.batch import Batch, Change
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.operators.feed import FeedOperator
from airflow_pgchange.utils.arguments import function

if TYPE_CHECKING:
    from airflow.sdk import Context

Process = Callable[[Batch, Iterator[Change], psycopg.Connection[Any]], object]


class BatchOperator(FeedOperator):
    """Hands each batch of a feed to a Python callable, and commits what it wrote together with the progress.

    The callable is called as ``process(batch, changes, connection)``: ``changes`` are the batch's changes in
    order, read as it goes; ``connection`` is the consumer's own. What it writes there is kept with the
    progress, or not at all. It neither commits nor rolls back, and may be called again for the same batch:
    after an error, or after a deadlock. Long work that writes early holds a transaction open, so read and
    compute first, write last. It is done when it returns: no ``async def``, no ``yield``.

    Guarantee: exactly once for results written through ``connection``; of commit queues, the event log and the
    topology also where the changes come from another PostgreSQL (``source_conn_id``; after a source that lost its
    latest transactions, at least once from the mark, and it is said), of tubes and message queues at least once
    then. At least once for results elsewhere, with ``batch.id`` as the key: it is the same in every attempt.

    Raises InvalidArgument for a ``process`` that cannot be called, such as the name of a function.

    :param process: the callable
    """

    shallow_copy_attrs: Sequence[str] = ("process",)

    def __init__(self, *, process: Process, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.process = function("process", process)

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        def write(connection: psycopg.Connection[Any]) -> None:
            made = self.call(batch, transaction.changes(), connection, context)
            if isinstance(made, Awaitable | Generator | AsyncGenerator):
                raise InvalidArgument(
                    f"{self.task_id}: the callable returned a {type(made).__name__} that nobody runs, so "
                    "nothing was processed: write it without async and yield"
                )

        transaction.ack(write)

    def call(
        self, batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any], context: Context
    ) -> object:
        """Call the callable with what it takes."""
        return self.process(batch, changes, connection)
