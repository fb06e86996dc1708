"""The tasks of DAGs that run batches in Spark, and the connection and settings that each needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_pgchange.plugins.watched_assets import unwrapped

MODULES = ("airflow_pgchange.operators.spark", "airflow_pgchange.decorators.spark")
DEFAULT_CONNECTION = "spark_default"


@dataclass(frozen=True, order=True)
class SparkNeeds:
    """The connection and the settings with which tasks submit to Spark.

    ``binary`` is the program that submits, if the task names a program. ``of_a_driver`` has the names of the task's
    arguments that have no effect with a Spark Connect server. ``env_vars`` are the environment variables of the task, as
    JSON.
    """

    conn_id: str
    binary: str | None = None
    of_a_driver: tuple[str, ...] = ()
    env_vars: str = "{}"

    @property
    def environment(self) -> dict[str, str]:
        variables: dict[str, str] = json.loads(self.env_vars)
        return variables


def spark_needs(node: Any) -> Iterator[SparkNeeds]:
    """Yield the needs of each Spark task in a serialized DAG, or in a part of it, without values that are templates."""
    if isinstance(node, Mapping):
        if "_task_module" in node and (needs := _needs(node)) is not None:
            yield needs
        for value in node.values():
            yield from spark_needs(value)
    elif isinstance(node, list):
        for value in node:
            yield from spark_needs(value)


def _needs(task: Mapping[str, Any]) -> SparkNeeds | None:
    if "spark_needs" in task:
        needs = json.loads(task["spark_needs"])
        if needs.get("detached"):
            # The cluster starts its driver, so this machine needs neither Spark nor Java.
            return None
    else:
        if not task.get("_is_mapped") or task["_task_module"] not in MODULES:
            return None
        # A serialized mapped task has only the arguments that all its instances share.
        fixed = unwrapped(task.get("partial_kwargs") or {})
        needs = {"conn_id": fixed.get("conn_id", DEFAULT_CONNECTION), "binary": fixed.get("spark_binary")}
    variables = unwrapped(task.get("env_vars"))
    plain = {
        str(name): str(value)
        for name, value in (variables if isinstance(variables, Mapping) else {}).items()
        if "{{" not in str(value)
    }
    return SparkNeeds(
        str(needs["conn_id"]),
        needs.get("binary"),
        tuple(needs.get("of_a_driver") or ()),
        json.dumps(plain, sort_keys=True),
    )
