"""What is looked at before a batch is claimed for Spark."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import Connection

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable
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
    """A port that accepts connections until it is the test's turn to close it."""
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


@pytest.mark.parametrize("connection", [None, spark(host="yarn")])
def test_yarn_without_its_configuration_is_refused(
    connection: Connection | None, worker: dict[str, str]
) -> None:
    there = "there is no connection spark" if connection is None else "the connection spark means YARN"
    with pytest.raises(
        InvalidArgument, match=f"{there}, and neither HADOOP_CONF_DIR nor YARN_CONF_DIR.*airflow conn"
    ):
        check_submission("spark", connection, None, worker)
    check_submission("spark", connection, None, {**worker, "YARN_CONF_DIR": "/etc/yarn"})


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
