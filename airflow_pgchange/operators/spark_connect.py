"""The Spark operator's way to a Spark Connect server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import CommsDecoder
from airflow.sdk.log import mask_secret

from airflow_pgchange.errors import ExtraMissing, InvalidArgument
from airflow_pgchange.spark.fork_client import Application

try:
    from airflow.providers.apache.spark.hooks.spark_connect import SparkConnectHook
except ImportError as error:
    raise ExtraMissing(
        f"a Spark Connect server needs {error.name}: pip install 'airflow-provider-pgchange[spark]'"
    ) from error

if TYPE_CHECKING:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator


def server_of(spark_conn_id: str) -> str | None:
    """The connection string of a Spark Connect server, a secret; None for a connection to submit to."""
    try:
        connection = BaseHook.get_connection(spark_conn_id)
    except AirflowException:
        # Without a connection Spark's hook submits to YARN.
        return None
    if connection.conn_type != SparkConnectHook.conn_type:
        return None
    if not connection.host:
        raise InvalidArgument(
            f"the connection {spark_conn_id} names no host: give it that of the Spark Connect server"
        )
    server = SparkConnectHook(spark_conn_id).get_connection_url()
    # As it is quoted there the token is not the one that Airflow knows to hide.
    for secret in filter(None, (connection.password, quote(connection.password or ""))):
        mask_secret(secret)
    return server


def refuse_arguments(spark_conn_id: str, given: Sequence[str]) -> None:
    """Raise InvalidArgument if arguments were given that only a driver of its own can use."""
    if given:
        raise InvalidArgument(
            f"{', '.join(given)}: the connection {spark_conn_id} is a Spark Connect server, which was started with "
            "what it has of that; leave it out, or submit, by a connection of type spark"
        )


def application(
    operator: SparkSubmitOperator,
    path: str,
    arguments: Sequence[Any] | None,
    server: str,
    environment: dict[str, str],
) -> Application:
    """Return the application at a path, to be run on a server."""
    return Application(
        path=path,
        server=server,
        arguments=tuple(str(one) for one in arguments or ()),
        environment=environment,
        conf={str(name): str(value) for name, value in (operator.conf or {}).items()},
        py_files=tuple(filter(None, (operator.py_files or "").split(","))),
    )


def keeper() -> int:
    """The process that runs one task after another: the worker, whose child each is; this one where there is none."""
    supervised = isinstance(getattr(task_runner, "SUPERVISOR_COMMS", None), CommsDecoder)
    return os.getppid() if supervised else os.getpid()
