"""The operator that processes batches with a Python callable."""

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
    """Passes each batch of a feed to a Python callable, and commits the writes of the callable together with the
    progress.

    The callable is called as ``process(batch, changes, connection)``. ``changes`` iterates over the changes of the
    batch in order, and reads them as it goes. ``connection`` is the connection of the consumer transaction: its writes
    are committed together with the progress, or not at all. The callable must neither commit nor roll back. It may be
    called again for the same batch, after an error or a deadlock. Read and compute first and write last, because the
    transaction holds locks and holds back vacuum from its first write on. The callable must not be an ``async def`` or
    a generator.

    Guarantee for writes through ``connection``: exactly once. If the changes come from another PostgreSQL
    (``source_conn_id``), this holds for commit queues, the event log and the topology. For tubes and message queues it
    is then at least once. If such a source lost its latest transactions, an error says so, and the changes after the
    mark are processed at least once. For rows in a table of a lake that ``airflow_pgchange.lake.write`` wrote: exactly
    once. For results in other systems the guarantee is at least once. ``batch.id`` is the same in every attempt, so use
    it as their key.

    Raises InvalidArgument if ``process`` cannot be called, for example if it is the name of a function.

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
                    f"{self.task_id}: the callable returned a {type(made).__name__} that is never run, so nothing was "
                    f"processed: write it without async and yield"
                )

        transaction.ack(write)

    def call(
        self, batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any], context: Context
    ) -> object:
        """Call the callable with its arguments."""
        return self.process(batch, changes, connection)
