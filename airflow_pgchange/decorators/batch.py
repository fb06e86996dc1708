"""``@task.pgchange_batch``: a function that processes a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.sdk.bases.decorator import (
    DecoratedOperator,
    KeywordParameters,
    TaskDecorator,
    task_decorator_factory,
)

from airflow_pgchange.feeds.batch import Batch, Change
from airflow_pgchange.operators.batch import BatchOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

GIVEN = ("batch", "changes", "connection")


class BatchDecoratedOperator(DecoratedOperator, BatchOperator):
    """BatchOperator around a decorated function, which takes any of ``batch``, ``changes`` and
    ``connection``.

    It may take arguments of its own and those of Airflow's context too. Its return value is not kept: a run
    can process several batches. The guarantee is BatchOperator's: exactly once for what is written through
    ``connection``, at least once elsewhere, with ``batch.id`` as the key.
    """

    template_fields: Sequence[str] = (*DecoratedOperator.template_fields, *BatchOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **BatchOperator.template_fields_renderers,
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable", "process")
    custom_operator_name = "@task.pgchange_batch"

    def __init__(
        self,
        *,
        python_callable: Callable[..., object],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        taken = inspect.signature(python_callable).parameters
        self._given = tuple(name for name in GIVEN if name in taken)
        free = [one for one in taken.values() if one.name not in GIVEN and one.kind is not one.VAR_POSITIONAL]
        op_args, op_kwargs = op_args or (), op_kwargs or {}
        # The base class sees keywords only: arguments that are too many, or given twice, are found here.
        inspect.Signature(free).bind_partial(*op_args, **op_kwargs)
        own = {**{one.name: value for one, value in zip(free, op_args, strict=False)}, **op_kwargs}
        super().__init__(
            python_callable=python_callable,
            # Stand-ins: the base class binds the function's arguments before there is a batch.
            op_kwargs={**dict.fromkeys(self._given), **own},
            kwargs_to_upstream={"process": python_callable},
            **kwargs,
        )
        self.op_kwargs = own

    def call(
        self, batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any], context: Context
    ) -> object:
        values = {"batch": batch, "changes": changes, "connection": connection}
        given = {name: values[name] for name in self._given}
        known = {**context, **self.op_kwargs, **given}
        return self.python_callable(
            **KeywordParameters.determine(self.python_callable, (), known).unpacking()
        )


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
