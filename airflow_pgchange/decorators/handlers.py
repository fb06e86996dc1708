"""``@task.pgchange_handler``: a function that is the handler of a group of the event log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_pgchange.decorators.base import WithRuntimeArguments
from airflow_pgchange.events import Handler
from airflow_pgchange.operators.handlers import EventHandlersOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class HandlerDecoratedOperator(WithRuntimeArguments, DecoratedOperator, EventHandlersOperator):
    """EventHandlersOperator with one handler: a decorated function, ``def`` or ``async def``, which takes ``delivery``.

    The function may also take arguments of its own and those of Airflow's context. The guarantee is that of
    EventHandlersOperator.

    :param handler: further arguments of Handler, such as ``{"reliable": False}``; ``name`` defaults to the function's
    """

    runtime_arguments: ClassVar[Sequence[str]] = ("delivery",)
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *EventHandlersOperator.template_fields,
    )
    shallow_copy_attrs: Sequence[str] = ("python_callable", "handlers")
    custom_operator_name = "@task.pgchange_handler"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        handler: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        only = Handler(**{"name": python_callable.__name__, **(handler or {}), "run": python_callable})
        super().__init__(python_callable=python_callable, kwargs_to_upstream={"handlers": [only]}, **kwargs)

    def bound(self, context: Context) -> Sequence[Handler]:
        (handler,) = self.handlers
        return [replace(handler, run=lambda delivery: self.call_with(context, delivery=delivery))]

    def execute(self, context: Context) -> dict[str, int]:
        return EventHandlersOperator.execute(self, context)


def pgchange_handler_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Turn a function into a task that handles a group's events; ``kwargs`` go to EventHandlersOperator."""
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=HandlerDecoratedOperator,
        **kwargs,
    )
