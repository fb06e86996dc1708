"""What differs between the versions of Airflow that this package supports, and that the provider common.compat lacks.

Every other module imports names that moved from ``airflow.providers.common.compat.sdk`` or from here, and checks no
version.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, BaseOperator, Stats, conf

__all__ = [
    "RetryDecision",
    "RetryPolicy",
    "Stats",
    "dag_bag",
    "dag_serialization",
    "left_before_the_answer",
    "moved",
    "prepare_stats",
    "supported",
    "with_retry_policy",
]


def moved(name: str, *modules: str) -> Any:
    """Return the object of this name from the first of these modules that has it. Name the newest module first.

    Raises ImportError if no module has it.
    """
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"this Airflow has no {name} in any of {', '.join(modules)}")


def supported(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return those of the arguments that the function, or the constructor of a class, declares."""
    declared = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in declared}


def dag_bag(folder: Path, bundle: Path) -> Any:
    """Return the DagBag of a file or a folder, whose DAGs may import what lies in ``bundle``."""
    bag = moved("DagBag", "airflow.dag_processing.dagbag", "airflow.models.dagbag")
    if str(bundle) not in sys.path:
        sys.path.append(str(bundle))
    return bag(str(folder), bundle_path=bundle, **supported(bag, include_examples=False))


def dag_serialization() -> Any:
    """Return the class by which Airflow stores a DAG as a dict, and makes a DAG of it."""
    module = "airflow.serialization.serialized_objects"
    try:
        return moved("DagSerialization", module)
    except ImportError:  # before Airflow 3.2
        return moved("SerializedDAG", module)


def left_before_the_answer(dependency: Callable[..., Any]) -> Any:
    """A dependency of a FastAPI route that ends before the answer is sent, so that a client that reads slowly holds
    nothing."""
    # Imported here, because FastAPI belongs to the API server. That of Airflow 3.1 lacks the argument, and ends every
    # dependency so.
    from fastapi import Depends  # noqa: PLC0415

    return Depends(dependency, **supported(Depends, scope="function"))


def prepare_stats() -> None:
    """Let ``Stats`` report to the configured collector. Before Airflow 3.2 it does so by itself."""
    try:
        factory = moved("get_stats_factory", "airflow.sdk.observability.metrics.stats_utils")
    except ImportError:
        return
    legacy = {"export_legacy_names": conf.getboolean("metrics", "legacy_names_on", fallback=False)}
    made = factory(**supported(factory, stats_cls=Stats))
    Stats.initialize(factory=made, **supported(Stats.initialize, **legacy))


try:
    from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy
except ImportError:  # before Airflow 3.3

    @dataclass(frozen=True)
    class RetryDecision:  # type: ignore[no-redef]
        """Why a task fails at once; None to retry as often as its ``retries`` say."""

        reason: str | None = None

        @classmethod
        def fail(cls, reason: str) -> Any:
            return cls(reason)

        @classmethod
        def default(cls) -> Any:
            return cls()

    class RetryPolicy:  # type: ignore[no-redef]
        """The base of retry policies."""

    def with_retry_policy(operator: type) -> None:
        """Let an operator evaluate its retry policy, which Airflow itself does from version 3.3 on.

        AirflowFailException is the error after which Airflow does not retry.
        """
        for name in ("execute", "resume_execution"):
            method = getattr(operator, name, None)
            # A copy of the abstract execute would hide that of a class behind this one, if a third class inherits both.
            if method not in (None, BaseOperator.execute):
                setattr(operator, name, _evaluated(method))

    def _evaluated(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                decision = self.retry_policy.evaluate(error, 1, 1)
                if decision.reason is None:
                    raise
                raise AirflowFailException(f"{error} ({decision.reason})") from error

        return run

else:

    def with_retry_policy(operator: type) -> None:
        """Do nothing: Airflow evaluates the retry policy of an operator."""
