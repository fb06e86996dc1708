"""Run the handler of a saga with one message that a test gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.messages.saga_handling import Answer as SagaAnswer
from airflow_pgchange.messages.saga_handling import Kind, Work, answer_of
from airflow_pgchange.operators.sagas import SagaHandlerOperator
from airflow_pgchange.testing.recorded_connection import Answer, RecordedConnection, Statement
from airflow_pgchange.testing.tasks import Task, prepared


@dataclass(frozen=True)
class StepRun:
    """The answer of a saga's handler, and the statements that would be committed.

    ``statements`` is empty unless the handler answered None.
    """

    answer: SagaAnswer
    statements: tuple[Statement, ...] = ()


def run_step_once(
    task: Task,
    data: Mapping[str, str | None],
    *,
    step: str | None = None,
    kind: Kind = "step",
    task_id: str | None = None,
    connection: psycopg.Connection[Any] | None = None,
    answer: Answer = lambda statement: None,
    arguments: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
    attempt: int = 1,
    was_done: bool = False,
    reason: str | None = None,
) -> StepRun:
    """Run the task of a ``SagaHandlerOperator`` with one message.

    The message asks the handler to do ``step``, or to undo it if ``kind`` is ``compensation``. An error of the handler is
    raised here. In Airflow the message would be tried again, and the task would fail after it has handled the other
    messages. ``attempt``, ``was_done`` and ``reason`` are fields of ``Work``. The other parameters are those of
    ``run_batch_once``.
    """
    operator, task_context = prepared(
        task, (SagaHandlerOperator,), task_id=task_id, arguments=arguments, context=context
    )
    if (step is None) is (kind in ("step", "compensation")):
        raise InvalidArgument(
            f"a {kind} {'needs the name of its step: give step=' if step is None else 'has no step: leave out step='}"
        )
    work = Work(1, "test", kind, step, dict(data), attempt, was_done, reason)
    results = RecordedConnection(answer) if connection is None else connection
    with results.transaction() as block:
        do = operator.bound(task_context)  # type: ignore[arg-type]
        saga_answer = answer_of(do, work, cast("psycopg.Connection[Any]", results))
        if connection is not None:
            connection.execute("set constraints all immediate")
        if saga_answer is not None:
            raise psycopg.Rollback(block)
    statements = tuple(results.statements) if isinstance(results, RecordedConnection) else ()
    return StepRun(saga_answer, statements)
