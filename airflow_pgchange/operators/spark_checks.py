"""Checks of the connection, the programs and the server that a Spark application needs, made before a claim."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable

if TYPE_CHECKING:
    from airflow.sdk import Connection

OLDEST_JAVA = 17
"""Spark 4 needs it: https://spark.apache.org/docs/latest/#downloading"""
REACHED_WITHIN = 10.0
"""Seconds to wait for a server to accept a connection."""
STANDALONE_PORT, CONNECT_PORT = 7077, 15002
DEFAULT_BINARY = "spark-submit"
OF_YARN = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")


def is_server(connection: Connection) -> bool:
    """Whether a connection names a Spark Connect server."""
    return bool(connection.conn_type == "spark_connect")


def master_of(connection: Connection | None) -> str:
    """Return the master to which Airflow's hook submits: that of YARN if there is no connection."""
    if connection is None:
        return "yarn"
    host, port = connection.host or "", f":{connection.port}" if connection.port else ""
    is_whole = connection.conn_type == "spark" and host and ("://" in host or not port)
    return f"{host if is_whole else f'{connection.conn_type}://{host}'}{port}"


def check_submission(
    spark_conn_id: str, connection: Connection | None, binary: str | None, environment: Mapping[str, str]
) -> None:
    """Check that an application can be submitted.

    Raises InvalidArgument if spark-submit, a Java that Spark supports or the configuration of YARN is missing, and
    ServerUnavailable if no standalone master accepts a connection.
    """
    master = master_of(connection)
    if master.partition(":")[0] == "yarn" and not any(environment.get(name) for name in OF_YARN):
        there = (
            f"the connection {spark_conn_id} means YARN"
            if connection
            else f"there is no connection {spark_conn_id}"
        )
        raise InvalidArgument(
            f"cannot submit to Spark: {there}, and neither {' nor '.join(OF_YARN)} says where YARN is; set one of them, "
            f"or choose another master: airflow connections add {spark_conn_id} --conn-type spark --conn-host 'local[2]'"
        )
    extra = {} if connection is None else connection.extra_dejson
    wanted = binary or extra.get("spark-binary") or DEFAULT_BINARY
    if shutil.which(wanted, path=environment.get("PATH")) is None:
        raise InvalidArgument(
            f"cannot submit to Spark: there is no program {wanted} in the PATH of this worker; `pip install pyspark` "
            f"brings {DEFAULT_BINARY}"
        )
    _check_java(environment)
    if master.startswith("spark://"):
        _reach("Spark master", list(_standalone(master)))


def check_server(connection: Connection, of_a_driver: Sequence[str]) -> None:
    """Check that a Spark Connect server accepts connections.

    Raises ServerUnavailable, and InvalidArgument if the connection names no host, or if the operator was given arguments
    that only a driver of its own can use: those ``of_a_driver``.
    """
    if of_a_driver:
        raise InvalidArgument(
            f"{', '.join(of_a_driver)}: the connection {connection.conn_id} is a Spark Connect server, which already "
            "runs, so these arguments have no effect: leave them out, or use a connection of type spark"
        )
    if not connection.host:
        raise InvalidArgument(
            f"the connection {connection.conn_id} has no host: give it the host of the Spark Connect server"
        )
    host = connection.host.removeprefix("sc://")
    _reach("Spark Connect server", [(host, connection.port or CONNECT_PORT)])


def _check_java(environment: Mapping[str, str]) -> None:
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin")) if home else environment.get("PATH"))
    if java is None:
        where = f"JAVA_HOME is {home}, where there is none" if home else "the PATH of this worker has none"
        raise InvalidArgument(
            f"cannot submit to Spark: it needs Java {OLDEST_JAVA} or newer, and {where}; install one, or set JAVA_HOME"
        )
    release = Path(java).resolve().parents[1] / "release"
    # Java 8 calls itself 1.8.
    version = re.search(
        r'^JAVA_VERSION="(?:1\.)?(\d+)', release.read_text() if release.exists() else "", re.MULTILINE
    )
    if version is not None and int(version[1]) < OLDEST_JAVA:
        raise InvalidArgument(
            f"cannot submit to Spark: it needs Java {OLDEST_JAVA} or newer, and {java} is Java {version[1]}; install a "
            "newer one, or set JAVA_HOME"
        )


def _standalone(master: str) -> Iterator[tuple[str, int]]:
    """The addresses of a standalone master and of those that stand by."""
    for one in master.removeprefix("spark://").split(","):
        address = urlsplit(f"//{one}")
        yield address.hostname or "", address.port or STANDALONE_PORT


def _reach(what: str, addresses: list[tuple[str, int]]) -> None:
    """Raise ServerUnavailable unless one of the addresses accepts a connection."""
    failures = []
    for host, port in addresses:
        try:
            socket.create_connection((host, port), REACHED_WITHIN).close()
        except OSError as error:
            failures.append(f"{host}:{port} ({error.strerror or error})")
        else:
            return
    raise ServerUnavailable(
        f"cannot reach the {what} at {', '.join(failures)}: start it, or correct the host and port of the connection"
    )
