"""The movements of a year from the first write to the result on a warm Connect server, and what each part takes.

``DAYS`` says how many days. Writers commit a day of their share at once, and their flights are not planned, so that a
movement changes no other table.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.feeds import CommitFeed
from demo import flights
from demo.spark import clean_environment
from tests import airflow_home
from tests.benchmarks.measure import Report, section, wall
from tests.benchmarks.spark_start import server

DAYS = int(os.environ.get("DAYS", "365"))
WRITERS = 2
A_DAY = 24 * 60
ROOT = Path(__file__).parents[2]
RESULT = ROOT / "dags" / "spark" / "route_delays.py"
READ = """
from airflow_pgchange.spark.entry_point import batch_jobs
for job in batch_jobs():
    job.rows("public.movement", key="id").write.format("noop").mode("overwrite").save()
"""
PARTS = ("claim", "start", "process", "merge", "ack")


@dataclass(frozen=True)
class Year:
    conninfo: str
    rows: list[flights.Row]

    def write(self) -> None:
        flights.replay(self.conninfo, self.rows, WRITERS, lambda _: None, minutes=A_DAY)

    def process(self, feed: CommitFeed, application: Path, **given: Any) -> int:
        """Process everything that is ready, and return the number of changes."""
        from airflow_pgchange.operators.spark import SparkBatchOperator

        given = {"postgres_conn_id": "here", "conn_id": "beside", "max_batches": None, **given}
        task = SparkBatchOperator(task_id="count", feed=feed, application=str(application), **given)
        return int(task.execute({})["changes"])

    def execute(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            cursor = connection.execute(statement, arguments)
            return cursor.fetchall() if cursor.description else []

    def parts(self, consumer: str) -> dict[str, float]:
        """Seconds of each part, over all batches of a consumer."""
        told = self.execute(
            "select seconds from pgchange.batches(null, 1000) where consumer like %s", f"{consumer}%"
        )
        return {part: sum(seconds.get(part, 0) for (seconds,) in told) for part in PARTS}

    def check(self) -> None:
        found = self.execute("select * from public.route_delay order by carrier, origin, dest")
        assert found == flights.expected(DAYS)


def run(conninfo: str, report: Report) -> None:
    airflow_home.prepare()
    os.environ |= clean_environment() | {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "AIRFLOW_CONN_HERE": airflow_home.uri(conninfo),
    }
    year = Year(conninfo, flights.movements(DAYS))
    year.execute(flights.DDL)
    with server(), tempfile.TemporaryDirectory(prefix="pgchange-") as folder:
        application = Path(folder) / "read.py"
        application.write_text(READ)
        apart(year, application, report)
        at_once(year, report)


def apart(year: Year, read: Path, report: Report) -> None:
    number = len(year.rows)
    with section(f"{number:,} changes of {DAYS} days, one thing after the other"):
        year.write()
        year.execute("truncate public.movement")
        untracked = wall(year.write)
        report.say("written into a table that nobody follows", untracked, "s")
        year.execute("truncate public.movement")
        ((branch,),) = year.execute("select revision.track('public.movement')")
        tracked = wall(year.write)
        report.say("written into a tracked table", tracked, "s")
        report.say("of which capture", tracked - untracked, "s")
        for consumer, application in (("warm", RESULT), ("read", read), ("whole", RESULT)):
            year.execute("truncate public.route_delay")
            feed = CommitFeed(consumer, branch)
            took = wall(partial(serve, year, feed, application))
            if consumer == "warm":
                continue
            name = "read into Spark" if consumer == "read" else "read, aggregated, staged and merged"
            report.say(name, took, "s")
            for part, seconds in year.parts(consumer).items():
                report.say(f"  {part}", seconds, "s")
        year.check()
        report.say(
            "changes a second, written and then processed", number / (tracked + took), "1/s", least=20_000
        )


def serve(year: Year, feed: CommitFeed, application: Path) -> None:
    assert year.process(feed, application) == len(year.rows)


def at_once(year: Year, report: Report) -> None:
    with section("the same, processed while it is written"), ThreadPoolExecutor(1) as pool:
        ((branch,),) = year.execute("select max(branch_id) from revision.commit_queue")
        year.execute("truncate public.route_delay")
        feed = CommitFeed("follows", branch)
        year.execute("select pubsub.register(%s, %s)", feed.consumer, branch)
        year.execute("select pubsub.move_consumer(%s, %s, pubsub.point(%s))", feed.consumer, branch, branch)

        def both() -> None:
            writing = pool.submit(year.write)
            done = 0
            while done < len(year.rows):
                done += year.process(feed, RESULT, idle_timeout="1 s")
            writing.result()

        took = wall(both)
        year.check()
        report.say("from the first write to the result", took, "s")
        report.say("changes a second", len(year.rows) / took, "1/s", least=20_000)
        report.say(
            "batches",
            len(
                year.execute("select 1 from pgchange.batches(null, 1000) where consumer like %s", "follows%")
            ),
            "",
        )
