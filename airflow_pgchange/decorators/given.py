"""What the decorators have in common: a function that is given something, and takes arguments of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import KeywordParameters

if TYPE_CHECKING:
    from airflow.sdk import Context


class Given:
    """An operator around a decorated function, which takes any of ``given``, arguments of its own, and those of Airflow's
    context. It comes before DecoratedOperator."""

    given: ClassVar[Sequence[str]]
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
        taken = inspect.signature(python_callable).parameters
        self._taken = tuple(name for name in self.given if name in taken)
        free = [
            one for one in taken.values() if one.name not in self.given and one.kind is not one.VAR_POSITIONAL
        ]
        op_args, op_kwargs = op_args or (), op_kwargs or {}
        # The base class sees keywords only: arguments that are too many, or given twice, are found here.
        inspect.Signature(free).bind_partial(*op_args, **op_kwargs)
        own = {**{one.name: value for one, value in zip(free, op_args, strict=False)}, **op_kwargs}
        # Stand-ins: the base class binds the function's arguments before there is anything to give.
        bound = {**dict.fromkeys(self._taken), **own}
        super().__init__(**{"python_callable": python_callable, "op_kwargs": bound, **kwargs})
        self.op_kwargs = own

    def call_with(self, context: Context, **values: Any) -> Any:
        """Call the function with what it takes of ``values``."""
        known = {**context, **self.op_kwargs, **{name: values[name] for name in self._taken}}
        return self.python_callable(
            **KeywordParameters.determine(self.python_callable, (), known).unpacking()
        )
