"""How the Spark operator uses a Spark Connect server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import CommsDecoder
from airflow.sdk.log import mask_secret

from airflow_pgchange.errors import ExtraMissing
from airflow_pgchange.operators.spark_checks import is_server
from airflow_pgchange.spark.fork_client import Application

try:
    from airflow.providers.apache.spark.hooks.spark_connect import SparkConnectHook
except ImportError as error:
    raise ExtraMissing(
        f"a Spark Connect server needs {error.name}: pip install 'airflow-provider-pgchange[spark]'"
    ) from error

if TYPE_CHECKING:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
    from airflow.sdk import Connection


def server_of(connection: Connection | None) -> str | None:
    """Return the connection string of a Spark Connect server, which is a secret; None for a connection of another
    type."""
    if connection is None or not is_server(connection):
        return None
    server = SparkConnectHook(connection.conn_id).get_connection_url()
    # Airflow masks the token only as it is. The connection string has it in quoted form.
    for secret in filter(None, (connection.password, quote(connection.password or ""))):
        mask_secret(secret)
    return server


def application(
    operator: SparkSubmitOperator,
    path: str,
    arguments: Sequence[Any] | None,
    server: str,
    environment: dict[str, str],
) -> Application:
    """Return the description of an application at a path that is to run on a server."""
    return Application(
        path=path,
        server=server,
        arguments=tuple(str(one) for one in arguments or ()),
        environment=environment,
        conf={str(name): str(value) for name, value in (operator.conf or {}).items()},
        py_files=tuple(filter(None, (operator.py_files or "").split(","))),
    )


def keeper() -> int:
    """Return the process that outlives the task: the worker, whose child this process is, or else this process itself."""
    supervised = isinstance(getattr(task_runner, "SUPERVISOR_COMMS", None), CommsDecoder)
    return os.getppid() if supervised else os.getpid()
