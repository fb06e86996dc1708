"""``@task.pgchange_batch``: a function that processes a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_pgchange.decorators.base import WithRuntimeArguments
from airflow_pgchange.feeds.batch import Batch, Change
from airflow_pgchange.operators.batch import BatchOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class BatchDecoratedOperator(WithRuntimeArguments, DecoratedOperator, BatchOperator):
    """BatchOperator with a decorated function, which takes any of ``batch``, ``changes`` and ``connection``.

    The function may also take arguments of its own and those of Airflow's context. Its return value is not kept, because
    a run can process several batches. The guarantee is that of BatchOperator: writes through ``connection`` happen
    exactly once. Other effects happen at least once, and ``batch.id`` is their idempotency key.
    """

    runtime_arguments: ClassVar[Sequence[str]] = ("batch", "changes", "connection")
    template_fields: Sequence[str] = (*DecoratedOperator.template_fields, *BatchOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **BatchOperator.template_fields_renderers,
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable", "process")
    custom_operator_name = "@task.pgchange_batch"

    def __init__(self, *, python_callable: Callable[..., object], **kwargs: Any) -> None:
        super().__init__(
            python_callable=python_callable, kwargs_to_upstream={"process": python_callable}, **kwargs
        )

    def call(
        self, batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any], context: Context
    ) -> object:
        return self.call_with(context, batch=batch, changes=changes, connection=connection)


def pgchange_batch_task(
    python_callable: Callable[..., object] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Turn a function into a task that processes a feed's batches; ``kwargs`` go to BatchOperator."""
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=BatchDecoratedOperator,
        **kwargs,
    )
