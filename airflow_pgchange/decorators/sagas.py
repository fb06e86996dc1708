"""``@task.pgchange_saga``: a function that does or compensates steps of sagas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_pgchange.decorators.base import WithRuntimeArguments
from airflow_pgchange.messages.saga_handling import Do
from airflow_pgchange.operators.sagas import SagaHandlerOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class SagaDecoratedOperator(WithRuntimeArguments, DecoratedOperator, SagaHandlerOperator):
    """SagaHandlerOperator with a decorated function, which takes any of ``work`` and ``connection``.

    The function may also take arguments of its own and those of Airflow's context. Its return values and the guarantee
    are those of SagaHandlerOperator.
    """

    runtime_arguments: ClassVar[Sequence[str]] = ("work", "connection")
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *SagaHandlerOperator.template_fields,
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **SagaHandlerOperator.template_fields_renderers,
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable", "do")
    custom_operator_name = "@task.pgchange_saga"

    def __init__(self, *, python_callable: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(
            python_callable=python_callable, kwargs_to_upstream={"do": python_callable}, **kwargs
        )

    def bound(self, context: Context) -> Do:
        return lambda work, connection: self.call_with(context, work=work, connection=connection)

    def execute(self, context: Context) -> dict[str, Any]:
        return SagaHandlerOperator.execute(self, context)


def pgchange_saga_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Turn a function into a task that processes a queue of sagas; ``kwargs`` go to SagaHandlerOperator."""
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=SagaDecoratedOperator,
        **kwargs,
    )
