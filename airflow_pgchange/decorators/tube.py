"""``@task.pgchange_collect``: a function that returns the downstream ids that may be gone at the source of a tube."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_pgchange.decorators.base import WithRuntimeArguments
from airflow_pgchange.operators.tube.control_pods import TubeGarbageCollectOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class CollectDecoratedOperator(WithRuntimeArguments, DecoratedOperator, TubeGarbageCollectOperator):
    """TubeGarbageCollectOperator with a decorated function as ``downstream``, which takes ``control`` and returns ids.

    The function may also take arguments of its own and those of Airflow's context. The guarantee is that of
    TubeGarbageCollectOperator.
    """

    runtime_arguments: ClassVar[Sequence[str]] = ("control",)
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *TubeGarbageCollectOperator.template_fields,
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **TubeGarbageCollectOperator.template_fields_renderers,
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable", "downstream")
    custom_operator_name = "@task.pgchange_collect"

    def __init__(self, *, python_callable: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(
            python_callable=python_callable, kwargs_to_upstream={"downstream": python_callable}, **kwargs
        )

    def execute(self, context: Context) -> dict[str, int]:
        self.downstream = lambda control: self.call_with(context, control=control)
        return TubeGarbageCollectOperator.execute(self, context)


def pgchange_collect_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Turn a function into a task that processes control pods; ``kwargs`` go to TubeGarbageCollectOperator."""
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=CollectDecoratedOperator,
        **kwargs,
    )
