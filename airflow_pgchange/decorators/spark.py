"""``@task.pgchange_spark``: a function that processes a batch in Spark. Needs the extra ``spark``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.operators.spark import SparkBatchOperator
from airflow_pgchange.spark import function

JOB = "job"


class SparkDecoratedOperator(DecoratedOperator, SparkBatchOperator):
    """SparkBatchOperator with a decorated function, which takes the place of an application.

    The function is called as ``function(job)`` in another process, inside a ``batch_job()`` block, and has no access to
    this task. It may take arguments of its own, which are pickled with it. Pass values of Airflow's context as templates,
    such as ``totals(day="{{ ds }}")``. Names that the function uses from its own file are sent with it. Modules that it
    imports must be installed where it runs. Its return value is not kept. The guarantee is that of SparkBatchOperator:
    merged results are exactly once, other effects at least once.
    """

    template_fields: Sequence[str] = (*DecoratedOperator.template_fields, *SparkBatchOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **SparkBatchOperator.template_fields_renderers,
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable",)
    custom_operator_name = "@task.pgchange_spark"

    def __init__(
        self,
        *,
        python_callable: Callable[..., object],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if {"application", "application_args"} & kwargs.keys():
            raise InvalidArgument(
                "the function is the application: remove the arguments application and application_args"
            )
        if kwargs.get("detached"):
            raise InvalidArgument(
                "a function cannot run detached, because its file is not on the cluster: use SparkBatchOperator with an "
                "application that is on the cluster"
            )
        signature = inspect.signature(python_callable)
        if JOB not in signature.parameters:
            raise InvalidArgument(
                f"{python_callable.__name__}: let it take the argument `{JOB}`, which is its batch"
            )
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name != JOB]
        own = dict(
            signature.replace(parameters=parameters).bind(*(op_args or ()), **(op_kwargs or {})).arguments
        )
        # The base class binds these arguments to the function now. The job does not exist yet, so pass None.
        super().__init__(python_callable=python_callable, op_kwargs={JOB: None, **own}, **kwargs)
        self.op_kwargs = own

    def _application_in(self, folder: Path) -> tuple[str, list[Any] | None]:
        application, call = function.write(folder, self.python_callable, self.op_kwargs)
        return str(application), [str(call)]


def pgchange_spark_task(
    python_callable: Callable[..., object] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Turn a function into a task that processes a feed's batches in Spark; ``kwargs`` go to SparkBatchOperator."""
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=SparkDecoratedOperator,
        **kwargs,
    )
