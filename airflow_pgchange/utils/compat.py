"""Differences between the supported versions of Airflow that the provider common.compat does not cover.

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
    """Return the DagBag of a file or a folder, whose DAGs may import modules from the folder ``bundle``."""
    bag = moved("DagBag", "airflow.dag_processing.dagbag", "airflow.models.dagbag")
    if str(bundle) not in sys.path:
        sys.path.append(str(bundle))
    return bag(str(folder), bundle_path=bundle, **supported(bag, include_examples=False))


def dag_serialization() -> Any:
    """Return the class with which Airflow converts a DAG to a dict and back."""
    module = "airflow.serialization.serialized_objects"
    try:
        return moved("DagSerialization", module)
    except ImportError:  # before Airflow 3.2
        return moved("SerializedDAG", module)


def left_before_the_answer(dependency: Callable[..., Any]) -> Any:
    """Return a dependency of a FastAPI route that ends before the response is sent. So a slow client holds nothing."""
    # Import it only here: only the API server has FastAPI. The version of Airflow 3.1 lacks the argument, and ends every
    # dependency before the response.
    from fastapi import Depends  # noqa: PLC0415

    return Depends(dependency, **supported(Depends, scope="function"))


def prepare_stats() -> None:
    """Let ``Stats`` report to the configured collector. Before Airflow 3.2 it does so by itself."""
    try:
        factory = moved("get_stats_factory", "airflow.sdk.observability.metrics.stats_utils")
    except ImportError:
        return
    legacy = {"export_legacy_names": conf.getboolean("metrics", "legacy_names_on", fallback=False)}
    configured = factory(**supported(factory, stats_cls=Stats))
    Stats.initialize(factory=configured, **supported(Stats.initialize, **legacy))


try:
    from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy
except ImportError:  # before Airflow 3.3

    @dataclass(frozen=True)
    class RetryDecision:  # type: ignore[no-redef]
        """The reason why a task fails without retries. None: retry as often as the task's ``retries`` allow."""

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
            # Skip the abstract execute: a copy would hide the execute of another base class, if a subclass has both.
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
