"""A batch for a Python callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psycopg

from airflow_pgchange.feeds.batch import Batch, Change
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.operators.draining import DrainingOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

Process = Callable[[Batch, Iterator[Change], psycopg.Connection[Any]], object]


class BatchOperator(DrainingOperator):
    """Hands each batch of a feed to a Python callable, and commits what it wrote together with the progress.

    The callable is called as ``process(batch, changes, connection)``: ``changes`` are the batch's changes in
    order, read as it goes; ``connection`` is the consumer's own. What it writes there is kept with the
    progress, or not at all. It neither commits nor rolls back, and may be called again for the same batch:
    after an error, or after a deadlock. Long work that writes early holds a transaction open, so read and
    compute first, write last.

    Guarantee for commit queues: exactly once for results written through ``connection``, also where the
    changes come from another PostgreSQL (``source_conn_id``; after a source that lost its latest
    transactions, at least once from the mark, and it is said). At least once for results elsewhere, with
    ``batch.id`` as the key: it is the same in every attempt.

    :param process: the callable
    """

    shallow_copy_attrs: Sequence[str] = ("process",)

    def __init__(self, *, process: Process, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.process = process

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        def write(connection: psycopg.Connection[Any]) -> None:
            self.call(batch, transaction.changes(), connection, context)
            self.stop_if_killed()

        transaction.ack(write)

    def call(
        self, batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any], context: Context
    ) -> None:
        """Call the callable with what it takes."""
        self.process(batch, changes, connection)
