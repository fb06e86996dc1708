"""The start of Spark for a batch: a thousand changes from claim to commit, beside a warm Connect server and by
spark-submit. Also three batches of a start against a single batch, and the number of changes from which executors are
faster than the driver.

``SIZES`` says at how many changes the two are compared, ``ROUNDS`` how often all is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.results.merge import merge, read_manifest
from airflow_pgchange.spark import submit
from airflow_pgchange.spark.job import SMALL
from demo.connect import ConnectServer
from demo.flights import DDL
from demo.spark import clean_environment
from tests import airflow_home
from tests.benchmarks.measure import Report, ratio, section, side_by_side, wall

ROUNDS = int(os.environ.get("ROUNDS", "5"))
CHANGES = 1000
SIZES = tuple(int(size) for size in os.environ.get("SIZES", "5000,20000,50000,100000").split(","))

MOVEMENTS = """
insert into public.movement (kind, flight_date, carrier, flight, origin, dest, at, delay)
select (array['departure', 'arrival', 'cancellation'])[1 + n % 3], '2013-01-01', 'UA', n % 9999, 'EWR', 'IAH',
       '2013-01-01 05:17', n % 60
from generate_series(1, {}) as n
"""
BODY = """    rows = job.rows("public.movement", key="id")
    figures = rows.groupBy("flight").agg(f.count("*").alias("n"), f.sum("delay").alias("delay"))
    job.merge(figures, into="public.by_batch", key="flight", mode="add")
"""
HEAD = """from pyspark.sql import functions as f
from airflow_pgchange.spark import batch_job, batch_jobs, job as jobs
jobs.SMALL = {small}
"""
ONE = HEAD + "with batch_job() as job:\n" + BODY
SEVERAL = HEAD + "for job in batch_jobs():\n" + BODY
BARE = """
import sys
import psycopg
import pyarrow as pa
from pyspark.sql import SparkSession, functions as f
spark = SparkSession.builder.getOrCreate()
with psycopg.connect(sys.argv[1]) as connection:
    rows = connection.execute("select flight, delay from public.movement order by id desc limit 1000").fetchall()
    flights, delays = zip(*rows)
    table = pa.table({"flight": pa.array(flights, pa.int32()), "delay": pa.array(delays, pa.int32())})
    frame = spark.createDataFrame(table).groupBy("flight").agg(f.count("*").alias("n"), f.sum("delay").alias("delay"))
    with connection.cursor() as cursor:
        cursor.executemany(
            "insert into public.by_hand values (%s, %s, %s)",
            [tuple(row) for row in zip(*frame.toArrow().to_pydict().values())],
        )
spark.stop()
"""
"""The code that a user would write without this package: no batch, no progress, no retry."""


@dataclass(frozen=True)
class Bench:
    """A tracked table, its consumer, and applications in a folder."""

    conninfo: str
    feed: CommitFeed
    folder: Path

    def application(self, name: str, text: str, small: int = SMALL) -> Path:
        path = self.folder / f"{name}_{small}.py"
        path.write_text(text.format(small=small))
        return path

    def write(self, changes: int, batches: int = 1) -> None:
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            for _ in range(batches):
                connection.execute(MOVEMENTS.format(changes))

    def operate(self, application: Path, changes: int = CHANGES, batches: int = 1, **given: Any) -> float:
        """Return the seconds of the operator's batches, from the first claim to the last commit.

        Each batch has ``changes`` changes.
        """
        from airflow_pgchange.operators.spark import SparkBatchOperator

        self.write(changes, batches)
        given = {
            "feed": self.feed,
            "postgres_conn_id": "here",
            "limit": changes,
            "max_batches": batches,
            **given,
        }
        task = SparkBatchOperator(task_id="count", application=str(application), **given)
        done = task.execute({})
        assert (done["batches"], done["changes"]) == (batches, batches * changes)
        return float(done["seconds"])

    def latest(self, batches: int) -> list[float]:
        """Return the seconds of the latest batches, oldest first."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            found = connection.execute("select seconds from pgchange.batches(null, %s)", [batches]).fetchall()
        return [sum(seconds.values()) for (seconds,) in reversed(found)]


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(DDL)
        row = connection.execute("select revision.track('public.movement')").fetchone()
        connection.execute(
            "create table public.by_hand (flight integer, n bigint, delay bigint);"
            "create table public.by_batch (flight integer primary key, n bigint, delay bigint)"
        )
    airflow_home.prepare()
    os.environ |= clean_environment() | {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "AIRFLOW_CONN_HERE": airflow_home.uri(conninfo),
        "AIRFLOW_CONN_LOCAL": json.dumps({"conn_type": "spark", "host": "local[2]"}),
    }
    with tempfile.TemporaryDirectory(prefix="pgchange-") as folder:
        bench = Bench(conninfo, CommitFeed("counted", row[0] if row else 0), Path(folder))
        with server() as remote:
            with section(f"{CHANGES:,} changes from claim to commit"):
                starts(bench, remote, report)
            with section("the driver against the executors of a warm server"):
                crossing(bench, report)
        with section("three batches by one spark-submit against one"):
            several(bench, report)


@contextmanager
def server() -> Iterator[str]:
    with ConnectServer() as one:
        os.environ["AIRFLOW_CONN_BESIDE"] = json.dumps(one.connection)
        yield one.remote


def starts(bench: Bench, remote: str, report: Report) -> None:
    application = bench.application("one", ONE)
    bare = bench.folder / "bare.py"
    bare.write_text(BARE)

    def start(*command: str, **environment: str) -> None:
        environment = {**os.environ, "SPARK_REMOTE": remote, **environment}
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stdout[-3000:] + done.stderr[-3000:])

    def fresh() -> float:
        """Do the same work as the operator, without forking a process."""
        bench.write(CHANGES)
        return wall(claim_to_commit)

    def claim_to_commit() -> None:
        with (
            ConsumerTransaction(bench.feed, bench.conninfo) as consumer,
            tempfile.TemporaryDirectory(dir=bench.folder) as folder,
        ):
            batch = consumer.claim(CHANGES)
            assert batch is not None
            manifest = Path(folder) / "manifest.json"
            handed = submit.environment(batch, bench.feed, bench.conninfo, None, manifest)
            start(str(application), **handed)
            staged = read_manifest(manifest)
            consumer.ack(lambda connection: merge(connection, batch, staged))

    def by_hand() -> float:
        return wall(lambda: start(str(bare), bench.conninfo))

    def forked() -> float:
        return bench.operate(application, conn_id="beside")

    def submitted() -> float:
        return bench.operate(application, conn_id="local")

    for warm in (fresh, by_hand, forked, submitted):
        warm()
    figures = side_by_side(ROUNDS, by_hand, fresh, forked, submitted)
    for name, row, most in zip(
        (
            "a bare client, a new process",
            "ours, a new process",
            "the operator, a fork",
            "the operator, spark-submit",
        ),
        figures,
        (None, None, 0.7, None),
        strict=True,
    ):
        report.say(name, sorted(row)[ROUNDS // 2], "s", most=most)
    report.say("ours / bare, new processes", ratio(figures[1], figures[0]), "x", most=1.3)


def crossing(bench: Bench, report: Report) -> None:
    """Measure the first batch of a session, in which the executors' Python imports all modules, and the next batch."""

    def path(small: int, changes: int) -> Callable[[], list[float]]:
        application = bench.application("several", SEVERAL, small)

        def two() -> list[float]:
            bench.operate(application, changes, batches=2, conn_id="beside")
            return bench.latest(2)

        return two

    path(0, 1000)()
    for changes in SIZES:
        pairs = side_by_side(ROUNDS, path(10**9, changes), path(0, changes))
        for at, which in enumerate(("first", "second")):
            figures = [[pair[at] for pair in row] for row in pairs]
            for name, row in zip(("the driver", "executors"), figures, strict=True):
                report.say(f"{changes:,} changes, {which} batch, {name}", sorted(row)[ROUNDS // 2], "s")
            report.say(f"{changes:,} changes, {which} batch, the driver / executors", ratio(*figures), "x")


def several(bench: Bench, report: Report) -> None:
    application = bench.application("several", SEVERAL)

    def batches(number: int) -> Callable[[], float]:
        return lambda: bench.operate(application, batches=number, conn_id="local")

    figures = side_by_side(ROUNDS, batches(1), batches(3))
    for name, row in zip(("one batch", "three batches"), figures, strict=True):
        report.say(name, sorted(row)[ROUNDS // 2], "s")
    report.say("three / one", ratio(figures[1], figures[0]), "x", most=1.3)
