"""The checks before a batch is claimed for Spark."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from airflow.sdk import Connection

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable, VersionsDiffer
from airflow_pgchange.operators import spark_checks
from airflow_pgchange.operators.spark_arguments import SparkArguments
from airflow_pgchange.operators.spark_checks import check_server, check_submission, master_of


def spark(**fields: Any) -> Connection:
    return Connection(conn_id="spark", **{"conn_type": "spark", **fields})


@pytest.fixture
def worker(tmp_path: Path) -> dict[str, str]:
    """The environment of a worker with spark-submit and Java 21, which are not run."""
    for program in ("spark-submit", "jdk/bin/java", "bin/java"):
        file = tmp_path / program
        file.parent.mkdir(exist_ok=True, parents=True)
        file.touch(0o755)
    (tmp_path / "jdk" / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="21.0.2"\n')
    return {"PATH": str(tmp_path), "JAVA_HOME": str(tmp_path / "jdk")}


@pytest.fixture
def port() -> Iterator[int]:
    """A port that accepts connections until the test closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("fields", "master"),
    [
        ({"host": "local[2]"}, "local[2]"),
        ({"host": "spark://a", "port": 7077}, "spark://a:7077"),
        ({"host": "a", "port": 7077}, "spark://a:7077"),
        ({"host": "yarn"}, "yarn"),
        ({"conn_type": "yarn"}, "yarn://"),
    ],
)
def test_the_master_is_the_one_of_airflows_hook(
    fields: dict[str, Any], master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

    connection = spark(**fields)
    monkeypatch.setattr(SparkSubmitHook, "get_connection", lambda *_: connection)
    assert master_of(connection) == master
    assert SparkSubmitHook(conn_id="spark")._connection["master"] == master


def test_a_worker_that_has_all_is_enough(worker: dict[str, str]) -> None:
    check_submission("spark", spark(host="local[2]"), None, worker)


@pytest.mark.parametrize(
    ("connection", "advice"),
    [
        (
            None,
            "no connection spark; .*--conn-host spark://HOST .*'local.2.' .*--conn-type spark_connect .*YARN if",
        ),
        (
            spark(host="yarn"),
            "the connection spark means YARN, and neither HADOOP_CONF_DIR nor YARN_CONF_DIR.*--conn-host spark://HOST",
        ),
    ],
)
def test_yarn_without_its_configuration_is_refused(
    connection: Connection | None, advice: str, worker: dict[str, str]
) -> None:
    """Unless a connection mentions YARN, the advice begins with a standalone master and a Spark Connect server."""
    with pytest.raises(InvalidArgument, match=advice):
        check_submission("spark", connection, None, worker)
    check_submission("spark", connection, None, {**worker, "YARN_CONF_DIR": worker["PATH"]})


@pytest.mark.parametrize(
    ("master", "name", "told"),
    [
        ("yarn", "HADOOP_CONF_DIR", "the folder of yarn-site.xml"),
        ("yarn", "YARN_CONF_DIR", "the folder of yarn-site.xml"),
        ("local", "SPARK_HOME", "the folder in which Spark is installed"),
    ],
)
def test_a_variable_that_names_no_folder_is_refused(
    master: str, name: str, told: str, worker: dict[str, str]
) -> None:
    there = {**dict.fromkeys(spark_checks.OF_YARN, worker["PATH"]), **worker}
    check_submission("spark", spark(host=master), None, {**there, name: f"/nowhere:{worker['PATH']}"})
    with pytest.raises(InvalidArgument, match=f"{name} is /nowhere, and this worker has no such.*{told}"):
        check_submission("spark", spark(host=master), None, {**there, name: "/nowhere"})


@pytest.mark.parametrize(
    ("binary", "extra"), [("spark3-submit", None), (None, '{"spark-binary": "spark3-submit"}')]
)
def test_the_program_that_submits_is_named_where_it_is_missing(
    binary: str | None, extra: str | None, worker: dict[str, str]
) -> None:
    with pytest.raises(InvalidArgument, match="no program spark3-submit in the PATH.*pip install pyspark"):
        check_submission("spark", spark(host="local", extra=extra), binary, worker)


def test_a_worker_without_java_is_told_where_it_was_looked_for(
    worker: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="Java 17 or newer, and JAVA_HOME is /nowhere"):
        check_submission("spark", spark(host="local"), None, {**worker, "JAVA_HOME": "/nowhere"})
    (tmp_path / "spark-submit").rename(tmp_path / "bin" / "spark-submit")
    (tmp_path / "bin" / "java").unlink()
    with pytest.raises(InvalidArgument, match="the PATH of this worker has none"):
        check_submission("spark", spark(host="local"), None, {"PATH": str(tmp_path / "bin")})


@pytest.mark.parametrize(("version", "number"), [("1.8.0_392", "8"), ("11.0.21", "11")])
def test_a_java_that_spark_does_not_support_is_refused(
    version: str, number: str, worker: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "jdk" / "release").write_text(f'JAVA_VERSION="{version}"\n')
    with pytest.raises(InvalidArgument, match=f"jdk/bin/java is Java {number}"):
        check_submission("spark", spark(host="local"), None, worker)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "the connection spark has no host"),
        ({"host": "sparky"}, "the connection spark has the master 'sparky', which Spark does not take"),
        ({"host": "mesos://a"}, "has the master 'mesos://a'"),
        ({"conn_type": "yarn"}, "has no host"),
        ({"conn_type": "http", "host": "a"}, "has the master 'http://a'"),
        ({"port": 7077}, "has no host"),
    ],
)
def test_a_connection_without_a_master_that_spark_takes_is_refused(
    fields: dict[str, Any], told: str, worker: dict[str, str]
) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"{told}.*spark://HOST .*yarn or local\[2\].*airflow connections add"
    ):
        check_submission("spark", spark(**fields), None, worker)


@pytest.mark.parametrize(("version", "is_told"), [("3.5.1", True), ("4.0.0", False), ("4.10.0", False)])
@pytest.mark.parametrize("by", ["SPARK_HOME", "spark-submit"])
def test_a_spark_that_is_too_old_is_refused(
    version: str, is_told: bool, by: str, worker: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "opt"
    (home / "jars").mkdir(parents=True)
    (home / "jars" / f"spark-core_2.13-{version}.jar").touch()
    if by == "SPARK_HOME":
        worker["SPARK_HOME"] = str(home)
    else:
        (home / "bin").mkdir()
        (tmp_path / "spark-submit").rename(home / "bin" / "spark-submit")
        worker["PATH"] = str(home / "bin")
    told = f"needs Spark 4.0 or newer, and {home} is Spark {version[:3]}; install a newer Spark"
    with pytest.raises(InvalidArgument, match=told) if is_told else nullcontext():
        check_submission("spark", spark(host="local"), None, worker)


def test_python_files_of_another_spark_are_told_before_a_connection_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spark = Mock(version="4.9.0", locate_file=metadata.distribution("pyspark-client").locate_file)
    monkeypatch.setattr(metadata, "distribution", lambda name: spark)
    with pytest.raises(VersionsDiffer, match="its Python files are of 4"):
        SparkArguments({"conn_id": "nowhere"}).check(Mock(), {})


def test_kubernetes_must_have_its_client_and_an_api_that_accepts_a_connection(
    worker: dict[str, str], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"host": "k8s://https://127.0.0.1", "port": port}
    monkeypatch.setattr(spark_checks, "OF_KUBERNETES", ("json", "not_there.kubernetes"))
    with pytest.raises(
        InvalidArgument,
        match=r"needs Python's not_there\.kubernetes.*apache-airflow-providers-cncf-kubernetes",
    ):
        check_submission("spark", spark(**there), None, worker)
    monkeypatch.setattr(spark_checks, "OF_KUBERNETES", ("json", "json.decoder"))
    check_submission("spark", spark(**there), None, worker)
    check_submission("spark", spark(conn_type="k8s", host="127.0.0.1", port=port), None, worker)
    with pytest.raises(ServerUnavailable, match=r"API of Kubernetes at 127\.0\.0\.1:1 "):
        check_submission("spark", spark(**{**there, "port": 1}), None, worker)


def test_a_standalone_master_must_accept_a_connection_or_one_that_stands_by(
    worker: dict[str, str], port: int
) -> None:
    check_submission("spark", spark(host="spark://127.0.0.1:1,127.0.0.1", port=port), None, worker)
    with pytest.raises(ServerUnavailable, match=r"Spark master at 127\.0\.0\.1:1 \(Connection refused\)"):
        check_submission("spark", spark(host="spark://127.0.0.1", port=1), None, worker)


def test_a_connect_server_must_accept_a_connection(port: int) -> None:
    check_server(spark(conn_type="spark_connect", host="127.0.0.1", port=port), [])
    with pytest.raises(
        ServerUnavailable, match=r"Spark Connect server at 127\.0\.0\.1:1 .*: start it, or correct"
    ):
        check_server(spark(conn_type="spark_connect", host="127.0.0.1", port=1), [])
    with pytest.raises(InvalidArgument, match="the connection spark has no host"):
        check_server(spark(conn_type="spark_connect"), [])
