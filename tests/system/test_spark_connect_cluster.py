"""A Spark Connect server on a real standalone cluster whose processes are killed in the middle of a batch."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_pgchange.errors import ApplicationFailed
from airflow_pgchange.spark.job import SMALL
from demo.connect import ConnectServer
from demo.spark import StandaloneSpark
from tests.connect_operator import LEDGER, airline, make_operator, run
from tests.quick_spark import JAVA
from tests.spark_server import wait_until
from tests.system.test_spark_cluster import executors, staged_rows

pytestmark = pytest.mark.release(
    "every run cuts off a Connect server in test_spark_connect_ends.py; Spark tries the tasks of an executor again"
)

CHANGES = SMALL + 1_000
PATIENCE = 400.0
"""The seconds within which the server must be killed, and the operator must notice it."""
SLOW = """
import time
from airflow_pgchange.spark.entry_point import batch_jobs

def slowly(batches):
    time.sleep(2)
    yield from batches

for job in batch_jobs():
    rows = job.rows("public.ledger", key="id").repartition(8)
    job.merge(rows.mapInArrow(slowly, rows.schema), into="public.copied", key=[], mode="append")
"""


@pytest.fixture(scope="module")
def spark_cluster() -> Iterator[StandaloneSpark]:
    with StandaloneSpark() as spark_cluster:
        yield spark_cluster


@pytest.fixture(scope="module")
def beside(spark_cluster: StandaloneSpark) -> Iterator[ConnectServer]:
    conf = {
        "spark.executor.memory": "600m",
        "spark.driver.extraJavaOptions": JAVA,
        "spark.executor.extraJavaOptions": JAVA,
    }
    with ConnectServer(master=spark_cluster.master_url, conf=conf) as beside:
        yield beside


@pytest.fixture
def copied(db, connect, beside, monkeypatch):
    """A ledger with too many changes for the driver to read itself, and a table for copies of them."""
    connection = connect()
    connection.execute(LEDGER)
    connection.execute("insert into ledger select from generate_series(6, %s)", [CHANGES])
    connection.execute("create table copied (id bigint, amount bigint)")
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", airline(db))
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(beside.connection))
    return connection


def kill_in_mid_batch(connection, pid: int) -> threading.Thread:
    """Kill a process as soon as part of a batch is staged. Return the thread, which ends after the kill."""

    def kill() -> None:
        wait_until(lambda: staged_rows(connection), "the first rows in staging")
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


def found(connection) -> tuple[int, ...]:
    return connection.execute("select count(*), count(distinct id), max(id) from copied").fetchone()


def attempts(connection) -> list[tuple[list[int]]]:
    """Return the numbers of the attempts on each batch."""
    query = "select array_agg(attempt order by attempt) from pgchange.batches() group by batch_id"
    return connection.execute(query).fetchall()


@pytest.mark.parametrize("part", ["executor", "worker"])
def test_a_killed_process_of_the_cluster_is_replaced_within_the_batch(
    spark_cluster, beside, copied, connect, tmp_path, part
):
    """Takes a minute: Spark has to notice the kill, and does the lost work again."""
    wait_until(lambda: len(executors(spark_cluster)) == 2, "both executors")
    before = set(executors(spark_cluster))
    victim = executors(spark_cluster)[0] if part == "executor" else spark_cluster.processes["worker-0"].pid
    killer = kill_in_mid_batch(connect(), victim)
    assert run(make_operator(tmp_path, SLOW))["changes"] == CHANGES
    killer.join()
    assert set(executors(spark_cluster)) != before, "the fault did not fire"
    assert "Lost executor" in log_of(beside), "the fault did not fire"
    assert found(copied) == (CHANGES, CHANGES, CHANGES)
    assert attempts(copied) == [([1],)]
    if part == "worker":
        spark_cluster.processes["worker-0"].wait()
        spark_cluster._start_worker(0)


def test_a_batch_whose_server_is_killed_is_kept_by_nobody_and_the_next_try_goes_on_with_it(
    spark_cluster, beside, copied, connect, tmp_path
):
    """Takes minutes: the server is killed in the middle of a batch, noticed after a minute, and started again."""
    began = time.monotonic()
    killer = kill_in_mid_batch(connect(), beside.process.pid)
    with pytest.raises(ApplicationFailed):
        run(make_operator(tmp_path, SLOW))
    killer.join()
    assert time.monotonic() - began < PATIENCE, "Spark's client waits for ten minutes"
    assert beside.process.wait() == -signal.SIGKILL, "the fault did not fire"
    assert found(copied) == (0, 0, None)
    beside.start()
    assert run(make_operator(tmp_path, SLOW))["changes"] == CHANGES
    assert found(copied) == (CHANGES, CHANGES, CHANGES)
    assert attempts(copied) == [([1, 2],)]


def log_of(beside: ConnectServer) -> str:
    return Path(beside.folder, "server.log").read_text(errors="replace")
