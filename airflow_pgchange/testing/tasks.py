"""Find the task of a test in its DAG, and prepare it as Airflow does before it executes a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from airflow.sdk import DAG, BaseOperator
from airflow.sdk.bases.decorator import DecoratedMappedOperator
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.definitions.xcom_arg import XComArg

from airflow_pgchange.errors import InvalidArgument

Task = DAG | BaseOperator | MappedOperator | XComArg
"""A DAG, an operator, or the result of a decorated function in a DAG."""

FUNCTIONS_OWN = ("op_args", "op_kwargs")
"""The template fields that hold the arguments of a decorated function."""

Operator = TypeVar("Operator", bound=BaseOperator)


def prepared(
    task: Task,
    kinds: tuple[type[Operator], ...],
    *,
    task_id: str | None,
    arguments: Mapping[str, Any] | None,
    context: Mapping[str, Any] | None,
) -> tuple[Operator, dict[str, Any]]:
    """Return a copy of the task of one of these kinds, ready to be executed, and its context.

    The context has the task, its DAG and its params, and ``context``. ``arguments`` are the arguments that other tasks,
    or a mapping, would give to the task. Raises InvalidArgument if there is no such task, or several, or if an argument
    is missing. Raises the operator's error for an invalid argument.
    """
    values = dict(arguments or {})
    operator = _single(_task_of(task, kinds, task_id), values)
    task_context = {"task": operator, "dag": operator.get_dag(), "params": operator.params.dump()}
    task_context |= context or {}
    own = dict(getattr(operator, "op_kwargs", None) or {})
    for name, value in values.items():
        if name in operator.template_fields and name not in FUNCTIONS_OWN:
            setattr(operator, name, value)
        elif hasattr(operator, "op_kwargs"):
            own[name] = value
        else:
            raise InvalidArgument(
                f"{operator.task_id} has no argument {name} that another task could give: such arguments are "
                f"{', '.join(operator.template_fields)}"
            )
    if hasattr(operator, "op_kwargs"):
        operator.op_kwargs = own
    _refuse_unknown(operator, own)
    operator.render_template_fields(task_context)
    operator.pre_execute(task_context)
    return operator, task_context


def _task_of(task: Task, kinds: tuple[type[Operator], ...], task_id: str | None) -> Any:
    if isinstance(task, XComArg):
        task = task.operator  # type: ignore[attr-defined]
    names = " or ".join(kind.__name__ for kind in kinds)
    if not isinstance(task, DAG):
        if not _is_of(task, kinds):
            raise InvalidArgument(f"{task!r:.300} is no task of {names}")
        return task
    fitting = {each.task_id: each for each in task.tasks if _is_of(each, kinds)}
    if task_id is not None and task_id in fitting:
        return fitting[task_id]
    if task_id is None and len(fitting) == 1:
        return next(iter(fitting.values()))
    raise InvalidArgument(
        f"DAG {task.dag_id}: task_id= must name a task of {names}, not {task_id!r}; it has {', '.join(fitting) or 'none'}"
    )


def _is_of(task: Any, kinds: tuple[type[Operator], ...]) -> bool:
    kind = task.operator_class if isinstance(task, MappedOperator) else type(task)
    return isinstance(kind, type) and issubclass(kind, kinds)


def _single(task: Any, arguments: dict[str, Any]) -> Any:
    """Return a copy of the task. For a mapped task, return a single run of it with its mapped arguments, and remove these
    from ``arguments``."""
    if not isinstance(task, MappedOperator):
        return task.prepare_for_execution()
    decorated = task.op_kwargs_expand_input if isinstance(task, DecoratedMappedOperator) else None
    mapped = (decorated or task.expand_input).value
    names = list(mapped) if isinstance(mapped, Mapping) else list(arguments)
    if missing := [name for name in names if name not in arguments]:
        raise InvalidArgument(
            f"{task.task_id} is mapped over {', '.join(missing)}: give the value of one run, as in "
            f"arguments={{'{missing[0]}': ...}}"
        )
    values = {name: arguments.pop(name) for name in names}
    return task.unmap(values if decorated is None else {"op_kwargs": values})


def _refuse_unknown(operator: BaseOperator, own: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if another task would have to give an argument: no other task runs in a test."""
    values = {name: getattr(operator, name) for name in operator.template_fields if name != "op_kwargs"}
    for name, value in {**values, **own}.items():
        if hasattr(value, "resolve"):
            raise InvalidArgument(
                f"{operator.task_id}: another task gives {name}, and in a test it does not run: give the value, as in "
                f"arguments={{'{name}': ...}}"
            )
