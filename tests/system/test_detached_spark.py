"""Detached batches on a real Spark: a driver on a worker of a standalone cluster, and a client of a Connect server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from demo.postgres import free_port
from demo.spark import StandaloneSpark
from tests.airflow_home import uri
from tests.connect_operator import ADD_UP, LEDGER
from tests.dag_bags import stored
from tests.job_server import JobServer
from tests.ledger import Connect
from tests.quick_spark import QUICK, ROOT
from tests.spark_server import SharedServer

pytestmark = pytest.mark.release(
    "every run has the operator before a stand-in for the master, and batch_job(handle) in a Spark session"
)

Connection = psycopg.Connection[Any]

DAG = """
from airflow.sdk import dag
from airflow_pgchange import CommitFeed
from airflow_pgchange.operators import SparkBatchOperator, claimed_batch
from tests.remote_job import RemoteJobOperator

FEED, JOB, API, ENVIRONMENT = CommitFeed("sums", 0), {job!r}, {api!r}, {environment!r}


@dag(dag_id="on_a_cluster", schedule=None)
def on_a_cluster():
    SparkBatchOperator(
        task_id="sums", detached=True, feed=FEED, postgres_conn_id="airline", application=JOB, env_vars=ENVIRONMENT,
        conf={conf!r}, driver_memory="512m", executor_memory="512m", total_executor_cores=1)


@dag(dag_id="on_a_server", schedule=None)
def on_a_server():
    with claimed_batch(feed=FEED, postgres_conn_id="airline") as batch:
        RemoteJobOperator(task_id="job", api=API, arguments=[JOB, batch.handle], environment=ENVIRONMENT)


on_a_cluster()
on_a_server()
"""


@pytest.fixture
def connection(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Connection:
    made = connect()
    made.execute(LEDGER)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return made


@pytest.fixture
def cluster_of_spark(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandaloneSpark]:
    with StandaloneSpark(rest_port=free_port()) as cluster:
        given = {"conn_type": "spark", "host": cluster.master_url, "extra": {"rest-port": cluster.rest_port}}
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(given))
        yield cluster


def run(folder: Path, dag: str, job: str, environment: dict[str, str], api: str = "") -> Any:
    """Run a DAG whose job is a given Python text."""
    application, dags = folder / "sums.py", folder / "dags"
    application.write_text(job)
    dags.mkdir()
    text = DAG.format(job=str(application), api=api, environment=environment, conf=QUICK)
    (dags / "spark.py").write_text(text)
    bag = stored(dags)
    assert bag.import_errors == {}
    return bag.dags[dag].test()


def state(found: Any) -> str:
    return str(found.state)


def totals(connection: Connection) -> list[tuple[Any, ...]]:
    return connection.execute("select what, n from total").fetchall()


def test_a_driver_on_a_worker_of_a_cluster_has_its_results_merged_by_the_task(
    metadata: None, cluster_of_spark: StandaloneSpark, connection: Connection, db: str, tmp_path: Path
) -> None:
    """Takes a minute: a master, workers, a driver and an executor are started."""
    environment = {"PGCHANGE_RESULTS": db, "PYTHONPATH": str(ROOT)}
    assert state(run(tmp_path, "on_a_cluster", ADD_UP, environment)) == "success"
    assert totals(connection) == [("all", 5)]
    assert list(cluster_of_spark.folder.glob("worker-*/driver-*")), "the driver did not run on a worker"


def test_an_application_that_fails_on_a_cluster_leaves_its_error_with_the_attempt(
    metadata: None, cluster_of_spark: StandaloneSpark, connection: Connection, db: str, tmp_path: Path
) -> None:
    """Takes a minute: a master, workers, a driver and an executor are started."""
    environment = {"PGCHANGE_RESULTS": db, "PYTHONPATH": str(ROOT)}
    broken = ADD_UP + "    raise ValueError('a bad row')\n"
    assert state(run(tmp_path, "on_a_cluster", broken, environment)) == "failed"
    assert totals(connection) == []
    ((error, failures),) = connection.execute("select error, failures from pgchange.claim").fetchall()
    assert "a bad row" in error
    assert failures == 1


def test_a_client_of_a_connect_server_elsewhere_has_its_results_merged_by_the_task_ack(
    metadata: None, connect_server: SharedServer, connection: Connection, db: str, tmp_path: Path
) -> None:
    """Takes half a minute: a Connect server is started. The client runs behind a stand-in for a remote job API."""
    environment = {"PGCHANGE_RESULTS": db, "SPARK_REMOTE": connect_server.remote}
    job = "import os, sys\nos.environ['PGCHANGE_HANDLE'] = sys.argv[1]\n" + ADD_UP
    with JobServer() as api:
        assert state(run(tmp_path, "on_a_server", job, environment, api.url)) == "success"
    assert totals(connection) == [("all", 5)]
    assert connect_server.sessions()[1] == 1
