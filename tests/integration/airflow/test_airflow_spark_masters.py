"""The arguments of the Spark operator to spark-submit for a cluster, as Spark has parsed them. There is no cluster."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_pgchange.spark import submit
from tests.connect_operator import LEDGER, PASSWORD, airline, make_operator, run
from tests.suite.servers import one_of

PARSED = """
import json, os, sys
from pathlib import Path
from pyspark import SparkConf, SparkContext
from airflow_pgchange.results.merge import write_manifest
from airflow_pgchange.spark.request import take
taken = take()
SparkContext._ensure_initialized()
seen = {"conf": dict(SparkConf().getAll()), "environment": dict(os.environ)}
seen |= {"arguments": sys.argv[1:], "python": sys.executable}
Path(__file__).with_name("seen").write_text(json.dumps(seen))
write_manifest(taken.manifest, [])
"""
"""A driver that creates no session, and therefore needs no master.

Its JVM shows the settings with which a session would start.
"""

GIVEN: dict[str, Any] = {
    "application_args": ["--day", "2026-01-31", "with a space"],
    "conf": {"spark.sql.shuffle.partitions": "7"},
    "executor_memory": "3g",
    "num_executors": 4,
}


@pytest.fixture
def parsed(db, connect, tmp_path, monkeypatch):
    """A function that returns the settings of a batch's driver for a master."""
    connect().execute(LEDGER)
    hadoop = tmp_path / "hadoop"
    hadoop.mkdir()
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", airline(db))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    # Airflow's hook requires the package for Kubernetes, but uses it only in cluster mode.
    monkeypatch.setattr(
        "airflow.providers.apache.spark.hooks.spark_submit.kube_client", SimpleNamespace(), raising=False
    )
    monkeypatch.setattr("airflow_pgchange.operators.spark_checks.OF_KUBERNETES", ())

    def submitted(connection: dict[str, Any]) -> dict[str, Any]:
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", **connection}))
        env_vars = {"HADOOP_CONF_DIR": str(hadoop), "COLOUR": "blue"}
        (tmp_path / "mine.py").touch()
        given = {**GIVEN, "env_vars": env_vars, "py_files": str(tmp_path / "mine.py"), "name": "a batch"}
        assert run(make_operator(tmp_path, PARSED, **given))["changes"] == 5
        return json.loads((tmp_path / "seen").read_text())

    return submitted


MASTERS = {
    "YARN": (
        {"host": "yarn", "extra": {"deploy-mode": "client", "queue": "night"}},
        {"spark.master": "yarn", "spark.yarn.queue": "night", "spark.executor.instances": "4"},
    ),
    "Kubernetes": (
        {"host": "k8s://https://127.0.0.1", "extra": {"namespace": "batches"}},
        {"spark.kubernetes.namespace": "batches", "spark.executor.instances": "4"},
    ),
    "standalone": ({"host": "spark://127.0.0.1"}, {}),
}


def pytest_generate_tests(metafunc):
    """A normal run tests one master, because each test starts a JVM. A release tests all masters."""
    if "master" in metafunc.fixturenames:
        metafunc.parametrize("master", one_of(list(MASTERS), metafunc))


def test_a_driver_for_a_cluster_starts_here_with_what_the_operator_was_given(parsed, tmp_path, master):
    """Takes seconds: a JVM starts."""
    connection, settings = MASTERS[master]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if master != "YARN":
            connection = {**connection, "port": listening.getsockname()[1]}
            settings = {**settings, "spark.master": f"{connection['host']}:{connection['port']}"}
        seen = parsed(connection)
    expected = {
        **settings,
        "spark.submit.deployMode": "client",
        "spark.app.name": "a batch",
        "spark.sql.shuffle.partitions": "7",
        "spark.executor.memory": "3g",
    }
    assert {name: seen["conf"].get(name) for name in expected} == expected
    assert (seen["arguments"], seen["python"]) == (GIVEN["application_args"], sys.executable)
    assert seen["environment"]["COLOUR"] == "blue"
    # The operator must not choose the Python of the executors: the cluster has its own.
    assert "PYSPARK_PYTHON" not in seen["environment"]
    shipped = ",".join(value for name, value in seen["conf"].items() if name.lower().endswith("pyfiles"))
    assert {Path(file).name for file in shipped.split(",")} == {"mine.py", Path(submit.py_files()).name}
    assert PASSWORD not in json.dumps([seen["conf"], seen["arguments"]])
