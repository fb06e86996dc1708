"""Drivers in a standalone Spark cluster, started and watched by the REST API of its masters.

spark-submit refuses Python applications in cluster mode there. The REST API takes them, as Spark documents it:
https://spark.apache.org/docs/latest/spark-standalone.html#rest-api
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_pgchange.errors import ServerUnavailable

ANSWER_WITHIN = 10.0
"""Seconds for an answer of a master."""
SUBMITTER = "org.apache.spark.deploy.SparkSubmit"
"""The main class of the driver. It runs Spark's Python applications, too."""
FINISHED, LOST = "FINISHED", "LOST"
ENDED = frozenset({FINISHED, LOST, "FAILED", "KILLED", "ERROR"})
"""The states of a driver that has ended. LOST is ours: no master knows the driver, for example after a restart."""


@dataclass(frozen=True)
class Driver:
    """A driver in a cluster: its id, and the REST API address of each master, such as http://spark:6066."""

    id: str
    masters: tuple[str, ...]


def submit(
    masters: Sequence[str],
    arguments: Sequence[str],
    properties: Mapping[str, str],
    environment: Mapping[str, str],
) -> Driver:
    """Start a driver on the first master that accepts it. Raises ServerUnavailable if none does.

    ``arguments`` are those of spark-submit, with the application. Its files must be on the workers. ``properties`` are
    the Spark properties of the driver's own process, such as its memory.
    """
    request = {
        "action": "CreateSubmissionRequest",
        "clientSparkVersion": "",
        "appResource": "",
        "mainClass": SUBMITTER,
        "appArgs": list(arguments),
        "sparkProperties": dict(properties),
        "environmentVariables": dict(environment),
    }
    failures = []
    for master in masters:
        try:
            answer = _call(master, "create", request)
        except OSError as error:
            failures.append(f"{master}: {error}")
            continue
        if answer.get("success"):
            return Driver(str(answer["submissionId"]), tuple(masters))
        failures.append(f"{master}: {answer.get('message') or 'refused'}")
    raise ServerUnavailable(
        f"no Spark master has started the driver ({'; '.join(failures)}). Set spark.master.rest.enabled=true for the "
        "master, and the port of its REST API as the extra rest-port of the Spark connection"
    )


def state_of(driver: Driver) -> str | None:
    """Return the state of a driver. None if no master can report it now, for example during a failover."""
    unknown = False
    for master in driver.masters:
        try:
            answer = _call(master, f"status/{driver.id}")
        except OSError:
            continue
        if answer.get("success"):
            return str(answer["driverState"])
        # A standby or recovering master gives a reason. An active master that does not know the driver gives none.
        unknown = unknown or not answer.get("message")
    return LOST if unknown else None


def kill(driver: Driver) -> None:
    """Kill a driver. Best effort: the results of a driver that survives are not merged any more."""
    for master in driver.masters:
        try:
            if _call(master, f"kill/{driver.id}", {}).get("success"):
                return
        except OSError:
            continue


def _call(master: str, action: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the answer of a master. Raises OSError if there is none."""
    request = urllib.request.Request(
        f"{master}/v1/submissions/{action}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json;charset=UTF-8"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_WITHIN) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        # If the API refuses a request, the body is JSON too.
        text = error.read()
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise OSError(f"{master} gave no JSON: is this the address of its REST API?") from error
    return answer if isinstance(answer, dict) else {}
