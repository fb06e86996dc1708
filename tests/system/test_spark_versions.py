"""Batches in each way that Spark reads and writes them, for every version of Spark in `make matrix`.

The rest of the suite runs with one version. Nothing stands in for Spark here: spark-submit and the Connect server are
real.
"""

from __future__ import annotations

import json
import sys

import pyspark.version
import pytest

from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.spark.installed_versions import sends_rows
from demo.spark import clean_environment
from tests.connect_operator import airline, make_operator, run
from tests.every_type import differences, fill, make_tables
from tests.hard_names import HARD

pytestmark = pytest.mark.release(
    "make matrix has it, for each version of Spark; every run has these ways with one version"
)

COPY = """
import json
from pathlib import Path
from pyspark.sql import functions as f
from airflow_pgchange.spark import batch_jobs, job as jobs
by_executors = []
for job in batch_jobs():
    # The application itself reads and stages the rows of the first batch, and executors those of the second.
    jobs.SMALL = 0 if by_executors else 1_000_000
    assert job.spark.conf.get("spark.sql.session.timeZone") == "America/New_York"
    rows = job.rows("public.typed", key="id").dropDuplicates(["id"])
    job.merge(rows, into="public.copied", key="id", mode="replace")
    by_executors.append(all(attempt >= 0 for attempt, _ in job.staged[0].winners))
    seen = job.changes().agg(f.lit("all").alias("what"), f.count("*").alias("n"))
    job.merge(seen, into="public.seen", key="what", mode="add")
    Path(__file__).with_name("told").write_text(json.dumps([by_executors, job.spark.version]))
"""
CONF = {"spark.sql.session.timeZone": "America/New_York"}


@pytest.fixture
def copied(db, connect, monkeypatch, tmp_path):
    """A function that copies a table with every type in two batches. It returns which of them executors staged, and the
    version of the Spark that ran them."""
    connection = connect()
    known = make_tables(connection, HARD)
    connection.execute("create table seen (what text primary key, n bigint not null)")
    branch = connection.execute("select revision.track('public.typed')").fetchone()[0]
    fill(connection, known)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", airline(db))

    def copy():
        feed = CommitFeed("copies", branch)
        task = make_operator(tmp_path, COPY, feed=feed, conf=CONF, limit=3, max_batches=None)
        assert run(task)["changes"] == 6
        assert connection.execute("select count(*) from copied").fetchone() == (6,)
        assert connection.execute("select n from seen").fetchone() == (6,)
        assert differences(connection, known) == []
        return json.loads((tmp_path / "told").read_text())

    return copy


def test_batches_by_spark_submit(copied, monkeypatch):
    """Takes many seconds: a driver starts."""
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[2]"}')
    for name, value in (clean_environment() | {"PYSPARK_PYTHON": sys.executable}).items():
        monkeypatch.setenv(name, value)
    assert copied() == [[False, True], pyspark.version.__version__]


def test_batches_on_a_connect_server(connect_server, copied):
    """Takes seconds: the server starts Python processes. ``tests.spark_server.PYTHON`` chooses the server's Spark."""
    by_executors, server = copied()
    client = pyspark.version.__version__
    print(f"client {client}, server {server}")
    assert by_executors == [not sends_rows(client, server), True]
