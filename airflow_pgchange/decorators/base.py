"""The base of the decorators: it passes arguments to a function, which may also take arguments of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import KeywordParameters

if TYPE_CHECKING:
    from airflow.sdk import Context


class WithRuntimeArguments:
    """A mixin for an operator with a decorated function. List it before DecoratedOperator.

    The function takes any of the arguments in ``runtime_arguments``, whose values exist only when the task runs. It may
    also take arguments of its own and those of Airflow's context.
    """

    runtime_arguments: ClassVar[Sequence[str]]
    python_callable: Callable[..., Any]
    op_kwargs: Any

    def __init__(
        self,
        *,
        python_callable: Callable[..., object],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        parameters = inspect.signature(python_callable).parameters
        self._taken = tuple(name for name in self.runtime_arguments if name in parameters)
        free = [
            parameter
            for parameter in parameters.values()
            if parameter.name not in self.runtime_arguments and parameter.kind is not parameter.VAR_POSITIONAL
        ]
        op_args, op_kwargs = op_args or (), op_kwargs or {}
        # The base class gets keywords only, so check here for too many arguments and for duplicates.
        inspect.Signature(free).bind_partial(*op_args, **op_kwargs)
        own = {
            **{parameter.name: value for parameter, value in zip(free, op_args, strict=False)},
            **op_kwargs,
        }
        # The base class binds the function's arguments now, so None stands in for values that exist only at run time.
        bound = {**dict.fromkeys(self._taken), **own}
        super().__init__(**{"python_callable": python_callable, "op_kwargs": bound, **kwargs})
        self.op_kwargs = own

    def call_with(self, context: Context, **values: Any) -> Any:
        """Call the function with those of ``values`` that it takes, its own arguments, and Airflow's context."""
        arguments = {**context, **self.op_kwargs, **{name: values[name] for name in self._taken}}
        return self.python_callable(
            **KeywordParameters.determine(self.python_callable, (), arguments).unpacking()
        )
