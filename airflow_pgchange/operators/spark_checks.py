"""Checks of the connection, the programs and the server that a Spark application needs, made before a claim."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from airflow.providers.common.compat.sdk import AirflowException, BaseHook

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable
from airflow_pgchange.feeds.argument_checks import OLDEST_SPARK

if TYPE_CHECKING:
    from airflow.sdk import Connection

OLDEST_JAVA = 17
"""Spark 4 needs it: https://spark.apache.org/docs/latest/#downloading"""
REACHED_WITHIN = 10.0
"""Seconds to wait for a server to accept a connection."""
STANDALONE_PORT, CONNECT_PORT, HTTPS_PORT = 7077, 15002, 443
MASTER = re.compile(r"local(\[.*\])?|local-cluster\[.*\]|yarn|(spark|k8s)://[^:].*")
"""The masters that Spark takes: https://spark.apache.org/docs/latest/submitting-applications.html#master-urls"""
JAR = re.compile(r"-(\d+\.\d+)[^-]*\.jar$")
"""The version at the end of the name of Spark's own archives, as in spark-core_2.13-4.2.0.jar."""
OF_KUBERNETES = ("kubernetes", "airflow.providers.cncf.kubernetes")
"""The modules without which Airflow's hook does not submit to Kubernetes."""
DEFAULT_BINARY = "spark-submit"
OF_YARN = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")


def environment_of(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an application with these variables. Its PATH includes the programs that pip installs
    beside this Python, such as spark-submit."""
    variables = {**os.environ, **env_vars}
    path = os.pathsep.join((variables.get("PATH", os.defpath), str(Path(sys.executable).parent)))
    return {**variables, "PATH": path}


def is_server(connection: Connection) -> bool:
    """Whether a connection names a Spark Connect server."""
    return bool(connection.conn_type == "spark_connect")


def connection_of(spark_conn_id: str) -> Connection | None:
    """The connection to Spark; None if Airflow has none of this name. Airflow's hook then submits to YARN."""
    try:
        return BaseHook.get_connection(spark_conn_id)
    except AirflowException:
        return None


def check_spark(
    spark_conn_id: str, binary: str | None, of_a_driver: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Check that Spark can run an application. ``binary`` and ``of_a_driver`` are as in the functions that this calls.

    Raises InvalidArgument, ServerUnavailable, and VersionsDiffer if a Spark Connect server is of another version.
    """
    connection = connection_of(spark_conn_id)
    if connection is not None and is_server(connection):
        check_server(connection, of_a_driver)
        # Imported here, because Spark is an extra.
        import_module("airflow_pgchange.operators.spark_connect").check_version(connection, environment)
    else:
        check_submission(spark_conn_id, connection, binary, environment)


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

    Raises InvalidArgument if the connection has no valid master, or if spark-submit, a supported Java, or a requirement
    of YARN or Kubernetes is missing. Raises ServerUnavailable if no standalone master, or the API of Kubernetes,
    accepts a connection.
    """
    master = master_of(connection)
    if connection is not None:
        _check_master(connection, master)
    if master == "yarn" and not any(environment.get(name) for name in OF_YARN):
        why = (
            f"there is no connection {spark_conn_id}; {_adding(spark_conn_id)}, the same with --conn-host 'local[2]' and "
            "without a port for a Spark on this machine, or `airflow connections add "
            f"{spark_conn_id} --conn-type spark_connect --conn-host sc://HOST --conn-port {CONNECT_PORT} --conn-password "
            f"TOKEN` for a Spark Connect server; without a connection, tasks submit to YARN if {' or '.join(OF_YARN)} is "
            "set"
            if connection is None
            else f"the connection {spark_conn_id} means YARN, and neither {' nor '.join(OF_YARN)} says where YARN is; "
            f"set one of them, or choose another master: {_replacing(spark_conn_id)}"
        )
        raise InvalidArgument(f"cannot submit to Spark: {why}")
    _check_folders(OF_YARN if master == "yarn" else (), environment)
    extra = {} if connection is None else connection.extra_dejson
    program = binary or extra.get("spark-binary") or DEFAULT_BINARY
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise InvalidArgument(
            f"cannot submit to Spark: there is no program {program} in the PATH of this worker; `pip install pyspark` "
            f"brings {DEFAULT_BINARY}"
        )
    _check_java(environment)
    _check_spark(program, environment)
    if master.startswith("spark://"):
        _reach("Spark master", list(_standalone(master)))
    elif master.startswith("k8s://"):
        _check_kubernetes(master)


def check_server(connection: Connection, of_a_driver: Sequence[str]) -> None:
    """Check that a Spark Connect server accepts connections.

    Raises ServerUnavailable. Raises InvalidArgument if the connection names no host, or if the operator has arguments
    ``of_a_driver``, which have no effect with a Spark Connect server.
    """
    if of_a_driver:
        raise InvalidArgument(
            f"{', '.join(of_a_driver)}: the connection {connection.conn_id} is a Spark Connect server, which already "
            f"runs, so these arguments have no effect. Leave them out, or use a connection of type spark"
        )
    if not connection.host:
        raise InvalidArgument(
            f"the connection {connection.conn_id} has no host: give it the host of the Spark Connect server"
        )
    host = connection.host.removeprefix("sc://")
    _reach("Spark Connect server", [(host, connection.port or CONNECT_PORT)])


def _check_master(connection: Connection, master: str) -> None:
    if MASTER.fullmatch(master):
        return
    name = connection.conn_id
    fault = f"has the master {master!r}, which Spark does not take" if connection.host else "has no host"
    raise InvalidArgument(
        f"cannot submit to Spark: the connection {name} {fault}. Give it type spark and a master as its host: "
        f"spark://HOST (port {STANDALONE_PORT}), k8s://https://HOST, yarn or local[2]; {_replacing(name)}"
    )


def _replacing(name: str) -> str:
    return f"`airflow connections delete {name}`, then {_adding(name)}"


def _adding(name: str) -> str:
    """Return the command that adds a connection to a standalone master, the most common case."""
    options = f"--conn-type spark --conn-host spark://HOST --conn-port {STANDALONE_PORT}"
    return f"`airflow connections add {name} {options}` for a standalone master"


def _check_folders(of_yarn: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise an error if a variable names no folder. Spark takes several folders, as PATH has them."""
    for name in (*of_yarn, "SPARK_HOME"):
        value = environment.get(name)
        if value and not any(Path(folder).is_dir() for folder in value.split(os.pathsep)):
            meaning = (
                "the folder in which Spark is installed"
                if name == "SPARK_HOME"
                else "the folder of yarn-site.xml"
            )
            raise InvalidArgument(
                f"cannot submit to Spark: {name} is {value}, and this worker has no such folder; set it to {meaning}, or "
                "unset it"
            )


def _check_kubernetes(master: str) -> None:
    missing = [name for name in OF_KUBERNETES if not _is_installed(name)]
    if missing:
        raise InvalidArgument(
            f"cannot submit to Spark: the master {master} needs Python's {missing[0]}, which this worker has not; "
            "`pip install apache-airflow-providers-cncf-kubernetes`"
        )
    address = urlsplit(master.removeprefix("k8s://"))
    if not address.hostname:
        # If the address has no scheme, Spark connects by HTTPS.
        address = urlsplit(f"https://{master.removeprefix('k8s://')}")
    port = address.port or (80 if address.scheme == "http" else HTTPS_PORT)
    _reach("API of Kubernetes", [(address.hostname or "", port)])


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # A package above the module is missing.
        return False


def _check_spark(binary: str, environment: Mapping[str, str]) -> None:
    """Raise an error if spark-submit belongs to an older Spark than this package works with."""
    program = Path(shutil.which(binary, path=environment.get("PATH")) or binary).resolve()
    home = Path(environment.get("SPARK_HOME") or program.parents[1])
    versions = [
        version_of_jar[1]
        for jar in home.glob("jars/spark-core_*.jar")
        if (version_of_jar := JAR.search(jar.name))
    ]
    for version in versions:
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SPARK:
            raise InvalidArgument(
                f"cannot submit to Spark: it needs Spark {'.'.join(map(str, OLDEST_SPARK))} or newer, and {home} is "
                f"Spark {version}; install a newer Spark, or unset SPARK_HOME and `pip install pyspark`"
            )


def _check_java(environment: Mapping[str, str]) -> None:
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin")) if home else environment.get("PATH"))
    if java is None:
        where = f"JAVA_HOME is {home}, where there is none" if home else "the PATH of this worker has none"
        raise InvalidArgument(
            f"cannot submit to Spark: it needs Java {OLDEST_JAVA} or newer, and {where}; install Java, or set JAVA_HOME"
        )
    release = Path(java).resolve().parents[1] / "release"
    # Java 8 calls itself 1.8.
    version = re.search(
        r'^JAVA_VERSION="(?:1\.)?(\d+)', release.read_text() if release.exists() else "", re.MULTILINE
    )
    if version is not None and int(version[1]) < OLDEST_JAVA:
        raise InvalidArgument(
            f"cannot submit to Spark: it needs Java {OLDEST_JAVA} or newer, and {java} is Java {version[1]}; install "
            f"a newer Java, or set JAVA_HOME"
        )


def _standalone(master: str) -> Iterator[tuple[str, int]]:
    """The addresses of a standalone master and of those that stand by."""
    for one in master.removeprefix("spark://").split(","):
        address = urlsplit(f"//{one}")
        yield address.hostname or "", address.port or STANDALONE_PORT


def _reach(server: str, addresses: list[tuple[str, int]]) -> None:
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
        f"cannot reach the {server} at {', '.join(failures)}: start it, or correct the host and port of the connection"
    )
