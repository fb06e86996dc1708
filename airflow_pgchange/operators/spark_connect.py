"""How the Spark operator uses a Spark Connect server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import CommsDecoder
from airflow.sdk.log import mask_secret

from airflow_pgchange import errors
from airflow_pgchange.errors import ApplicationFailed, ExtraMissing
from airflow_pgchange.operators.spark_checks import is_server
from airflow_pgchange.spark import fork_client
from airflow_pgchange.spark.fork_client import Application

try:
    from airflow.providers.apache.spark.hooks.spark_connect import SparkConnectHook
except ImportError as error:
    raise ExtraMissing(
        f"a Spark Connect server needs {error.name}: pip install 'airflow-provider-pgchange[spark-connect]'"
    ) from error

if TYPE_CHECKING:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
    from airflow.sdk import Connection


VERSION_CHECK = str(Path(fork_client.__file__).with_name("version_check.py"))


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


def check_version(connection: Connection, environment: Mapping[str, str]) -> None:
    """Raise VersionsDiffer unless the server's Spark fits the installed Spark.

    An application asks the server, because this process would need a second to import Spark's client. The fork server
    that starts it is also used for the batches. Raises the application's other errors unchanged, such as
    ServerUnavailable.
    """
    version_check = Application(VERSION_CHECK, server_of(connection) or "", environment=dict(environment))
    output: list[str] = []
    try:
        fork_client.start(version_check, keeper()).wait(output.append)
    except ApplicationFailed as failure:
        # The last line is that of a traceback: the class of the error, a colon and the message.
        name, *message = (output or [""])[-1].split(": ", 1)
        error_class = getattr(errors, name.rpartition(".")[2], ApplicationFailed)
        raise error_class("".join(message) or str(failure)) from failure


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
