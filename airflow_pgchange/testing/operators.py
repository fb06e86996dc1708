"""Run the operator of a DAG with one batch of changes that a test gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.error_translation import is_of_the_batch
from airflow_pgchange.feeds.event_log import EventFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.handlers import EventHandlersOperator
from airflow_pgchange.testing.changes import BATCH_ID, Given, batch_of_rows, rows_of
from airflow_pgchange.testing.handlers import HandlerFailure, handled
from airflow_pgchange.testing.recorded_connection import Answer, RecordedConnection, Statement
from airflow_pgchange.testing.tasks import Task, prepared
from airflow_pgchange.testing.transaction import FakeTransaction
from airflow_pgchange.utils.arguments import feed_of


@dataclass(frozen=True)
class BatchRun:
    """The outcome of one batch.

    ``statements`` are the statements that would be committed with the batch. There are none if they were executed in
    PostgreSQL. ``failures`` are the failed calls of handlers; these do not fail the task. ``dead_letter`` is the error
    with which the batch would become a dead letter. It is the error of the last attempt of a task with
    ``on_give_up="dead_letter"``, or with ``"bisect"`` and one change.
    """

    batch: Batch
    statements: tuple[Statement, ...] = ()
    failures: tuple[HandlerFailure, ...] = ()
    dead_letter: Exception | None = None


def run_batch_once(
    task: Task,
    changes: Sequence[Given],
    *,
    task_id: str | None = None,
    connection: psycopg.Connection[Any] | None = None,
    postgres_conn_id: str | None = None,
    answer: Answer = lambda statement: None,
    arguments: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
    key: Sequence[str] | None = None,
    attempt: int = 1,
    batch_id: str = BATCH_ID,
) -> BatchRun:
    """Run the task of a ``BatchOperator`` or an ``EventHandlersOperator``, or of their decorators, with one batch.

    No server is needed: the callable writes to a ``RecordedConnection``, and ``answer`` returns the rows of the
    callable's queries. With ``connection`` or ``postgres_conn_id`` the callable writes to PostgreSQL, and its writes are
    committed. If a transaction is open on ``connection``, the writes are part of it. No batch is claimed, and no consumer
    moves. Errors that the task would raise in Airflow are raised here. Raises InvalidArgument for changes and arguments
    that are not possible in a run.

    :param task: a DAG, an operator, or the result of a decorated function in a DAG
    :param changes: ids, mappings with columns of the feed, or events
    :param task_id: the task of the DAG; needed if several of its tasks take batches
    :param arguments: arguments that other tasks, or a mapping, would give to the task, by name
    :param context: Airflow's context, for templates and for functions that take parts of it
    :param key: the types of the columns of the ids, as for ``batch_of``
    :param attempt: the number of this attempt on the batch
    """
    kinds: tuple[type[BatchOperator | EventHandlersOperator], ...] = (BatchOperator, EventHandlersOperator)
    operator, task_context = prepared(task, kinds, task_id=task_id, arguments=arguments, context=context)
    if isinstance(operator, EventHandlersOperator):
        if connection is not None or postgres_conn_id is not None:
            raise InvalidArgument(
                f"{operator.task_id}: handlers open connections of their own: leave out connection and postgres_conn_id"
            )
        feed = EventFeed(operator.group)
        rows = rows_of(feed, changes)
        failures = handled(operator, task_context, rows, attempt)
        return BatchRun(batch_of_rows(feed, rows, attempt, batch_id), failures=failures)
    source = feed_of(operator.feed)
    rows = rows_of(source, changes)
    batch = batch_of_rows(source, rows, attempt, batch_id, key)
    if batch.count > operator.limit:
        raise InvalidArgument(
            f"{operator.task_id}: a batch has at most limit={operator.limit} changes, not {batch.count}: give fewer"
        )
    batch_changes = [source.change(row) for row in rows]
    with _results(connection, postgres_conn_id, answer) as results:
        try:
            with FakeTransaction(source, batch, batch_changes, results) as transaction:
                operator.process_batch(transaction, batch, task_context)  # type: ignore[arg-type]
        except Exception as error:
            if operator.max_attempts is None or attempt < operator.max_attempts:
                raise
            is_poison = batch.count == 1 and is_of_the_batch(error)
            if operator.on_give_up == "dead_letter" or (operator.on_give_up == "bisect" and is_poison):
                return BatchRun(batch, dead_letter=error)
            raise
        statements = tuple(results.statements) if isinstance(results, RecordedConnection) else ()
    return BatchRun(batch, statements)


@contextmanager
def _results(
    connection: psycopg.Connection[Any] | None, postgres_conn_id: str | None, answer: Answer
) -> Iterator[psycopg.Connection[Any] | RecordedConnection]:
    if connection is not None and postgres_conn_id is not None:
        raise InvalidArgument("give connection or postgres_conn_id, not both")
    if postgres_conn_id is not None:
        with PgChangeHook(postgres_conn_id).get_conn(primary=True) as opened:
            yield opened
    else:
        yield RecordedConnection(answer) if connection is None else connection
