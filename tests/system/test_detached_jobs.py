"""Detached batches in DAGs whose jobs are processes elsewhere. A stand-in for a remote job API runs the jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest

from tests.airflow_home import uri
from tests.dag_bags import stored
from tests.job_server import JobServer
from tests.ledger import Connect, make_ledger

Connection = psycopg.Connection[Any]

JOB = """
import os, sys
from pathlib import Path
import psycopg
from airflow_pgchange import ConsumerTransaction
from airflow_pgchange.detached import Handle, batch_of, renewed
from airflow_pgchange.results import manifests

assert "airflow" not in sys.modules
database = os.environ["PGCHANGE_RESULTS"]
handle = Handle.from_text(os.environ.get("PGCHANGE_HANDLE") or sys.argv[1])
with ConsumerTransaction(handle.feed, database) as transaction:
    transaction.resume(handle.token)
    ids = [change.id for change in transaction.changes()]
    transaction.keep_lease()
Path(__file__).with_suffix(".read").touch()
sys.stdin.read()
with psycopg.connect(database, autocommit=True) as connection:
    connection.execute("insert into worked select unnest(%s::bigint[])", [ids])
    manifests.keep(connection, batch_of(handle, database), ())
"""
"""The job: it creates a file when it has read its batch, and writes its results when its input ends."""
DAG = """
from airflow.sdk import dag
from airflow_pgchange import CommitFeed
from airflow_pgchange.operators import SparkBatchOperator, claimed_batch
from tests.remote_job import RemoteJobOperator

API, JOB, WHERE = {api!r}, {job!r}, {where!r}


@dag(dag_id="remote", schedule=None)
def remote():
    with claimed_batch(feed=CommitFeed("remote", 0), postgres_conn_id="airline") as batch:
        RemoteJobOperator(
            task_id="job", api=API, arguments=[JOB, batch.handle], environment={{"PGCHANGE_RESULTS": WHERE}})


@dag(dag_id="in_one_task", schedule=None)
def in_one_task():
    SparkBatchOperator(
        task_id="sums", detached=True, feed=CommitFeed("one", 0), postgres_conn_id="airline", application=JOB,
        env_vars={{"PGCHANGE_RESULTS": WHERE}}, status_poll_interval=0.1)


remote()
in_one_task()
"""


@pytest.fixture
def api() -> Iterator[JobServer]:
    with JobServer() as server:
        yield server


@pytest.fixture
def connection(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Connection:
    made = connect()
    make_ledger(made)
    made.execute("create table worked (id bigint); insert into ledger select from generate_series(1, 3)")
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return made


@pytest.fixture
def dags(
    metadata: None,
    api: JobServer,
    connection: Connection,
    db: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", api.connection)
    job = tmp_path / "job.py"
    job.write_text(JOB)
    folder = tmp_path / "dags"
    folder.mkdir()
    (folder / "jobs.py").write_text(DAG.format(api=api.url, job=str(job), where=db))
    bag = stored(folder)
    assert bag.import_errors == {}
    return bag.dags


def sessions(connection: Connection) -> list[tuple[Any, ...]]:
    """The other sessions of the database, with their states and transactions."""
    return connection.execute(
        "select application_name, state, xact_start from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()"
    ).fetchall()


def run_and_watch(dag: Any, api: JobServer, connection: Connection, marker: Path) -> tuple[Any, Any]:
    """Run a DAG whose job works until no session is open. Return the run, and the sessions that were open last."""
    found: list[Any] = []

    def watch() -> None:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and found[-1:] != [[]]:
                time.sleep(0.05)
                if marker.exists():
                    found.append(sessions(connection))
        finally:
            api.end_input()

    watcher = Thread(target=watch)
    watcher.start()
    run = dag.test()
    watcher.join()
    return run, found[-1]


@pytest.mark.parametrize(
    ("dag", "tasks"),
    [
        (
            "remote",
            {
                "claim": "success",
                "job": "success",
                "ack": "success",
                "release": "skipped",
            },
        ),
        ("in_one_task", {"sums": "success"}),
    ],
)
def test_while_a_job_elsewhere_runs_no_connection_is_open(
    dag: str, tasks: dict[str, str], dags: Any, api: JobServer, connection: Connection, tmp_path: Path
) -> None:
    """Takes seconds: Airflow runs a whole DAG."""
    run, open_ones = run_and_watch(dags[dag], api, connection, tmp_path / "job.read")
    assert open_ones == []
    assert {ti.task_id.removeprefix("batch."): str(ti.state) for ti in run.get_task_instances()} == tasks
    assert connection.execute("select array_agg(id order by id) from worked").fetchall() == [([1, 2, 3],)]
    acked = "select attempt, acked_at is not null from pgchange.batch"
    assert connection.execute(acked).fetchall() == [(1, True)]
