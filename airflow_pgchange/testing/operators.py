"""One batch of given changes, run through the operator of a DAG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.event import EventFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.handlers import EventHandlersOperator
from airflow_pgchange.testing.given import BATCH_ID, Given, batch_of_rows, rows_of
from airflow_pgchange.testing.handlers import HandlerFailure, handled
from airflow_pgchange.testing.recorded import Answer, RecordedConnection, Statement
from airflow_pgchange.testing.tasks import Task, prepared
from airflow_pgchange.testing.transaction import GivenTransaction
from airflow_pgchange.utils.arguments import feed_of


@dataclass(frozen=True)
class BatchRun:
    """What became of one batch.

    ``statements`` are those that would be committed with it; none if they went to PostgreSQL. ``failures`` are the calls
    of handlers that failed, which do not fail the task. ``dead_letter`` is the error of a batch that became a dead
    letter: this was its last attempt, and the task has ``on_give_up="dead_letter"``.
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
    attempt: int = 1,
    batch_id: str = BATCH_ID,
) -> BatchRun:
    """Run the task of a ``BatchOperator`` or an ``EventHandlersOperator``, or of their decorators, with one batch.

    No server is needed: the callable writes to a ``RecordedConnection``, whose reads ``answer`` answers. With
    ``connection`` or ``postgres_conn_id`` it writes to PostgreSQL, and what it wrote is committed; if a transaction is
    open on ``connection``, that decides. Nothing is claimed, and no consumer moves. What the task raises in Airflow is
    raised here. Raises InvalidArgument for changes and arguments that no run can have.

    :param task: a DAG, an operator, or what a decorated function returned in a DAG
    :param changes: ids, columns of the feed by name, or events
    :param task_id: which task of the DAG; needed if several take batches
    :param arguments: what other tasks or a mapping give the task, by name
    :param context: Airflow's context, for templates and for functions that take parts of it
    :param attempt: the number of this attempt on the batch
    """
    kinds: tuple[type[BatchOperator | EventHandlersOperator], ...] = (BatchOperator, EventHandlersOperator)
    operator, known = prepared(task, kinds, task_id=task_id, arguments=arguments, context=context)
    if isinstance(operator, EventHandlersOperator):
        if connection is not None or postgres_conn_id is not None:
            raise InvalidArgument(
                f"{operator.task_id}: handlers open connections of their own: leave out connection and postgres_conn_id"
            )
        feed = EventFeed(operator.group)
        rows = rows_of(feed, changes)
        failures = handled(operator, known, rows, attempt)
        return BatchRun(batch_of_rows(feed, rows, attempt, batch_id), failures=failures)
    found = feed_of(operator.feed)
    rows = rows_of(found, changes)
    batch = batch_of_rows(found, rows, attempt, batch_id)
    if batch.count > operator.limit:
        raise InvalidArgument(
            f"{operator.task_id}: a batch has at most limit={operator.limit} changes, not {batch.count}: give fewer"
        )
    given = [found.change(row) for row in rows]
    with _results(connection, postgres_conn_id, answer) as results:
        try:
            with GivenTransaction(found, batch, given, results) as transaction:
                operator.process_batch(transaction, batch, known)  # type: ignore[arg-type]
        except Exception as error:
            if operator.on_give_up == "fail" or attempt < operator.max_attempts:
                raise
            return BatchRun(batch, dead_letter=error)
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
