"""The time from a commit to its result if each batch is a run of its DAG. It is compared with Airflow's minimum: a task
that does nothing, in a DAG that an asset's event starts."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from demo import flights
from demo.airflow import LocalAirflow, airflow_connection, sqlalchemy_url
from demo.connect import ConnectServer
from tests.benchmarks.measure import Report, ratio, section, side_by_side
from tests.spark_server import wait_until

CHANGES = 400
ROUNDS, WARMING = 9, 2
A_DAY = 24 * 60
ROOT = Path(__file__).parents[2]

DAGS = """
from airflow.sdk import Asset, dag, task
from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators.spark import SparkBatchOperator

@dag(schedule=[Asset("floor")], max_active_runs=1)
def floor():
    @task
    def nothing(): pass
    nothing()

FEED = CommitFeed("one_a_run", {branch})

@dag(schedule=[feed_asset(FEED, postgres_conn_id="here")], max_active_runs=1)
def one_a_run():
    SparkBatchOperator(task_id="count", feed=FEED, postgres_conn_id="here", application={application!r})

floor()
one_a_run()
"""


def run(conninfo: str, report: Report) -> None:
    with ExitStack() as running:
        connection = running.enter_context(psycopg.connect(conninfo, autocommit=True))
        connection.execute(flights.DDL)
        row = connection.execute("select revision.track('public.movement')").fetchone()
        connection.execute("create database airflow")
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="pgchange-")))
        (folder / "dags").mkdir()
        application = str(ROOT / "dags" / "spark" / "route_delays.py")
        (folder / "dags" / "both.py").write_text(
            DAGS.format(branch=row[0] if row else 0, application=application)
        )
        server = running.enter_context(ConnectServer())
        airflow = LocalAirflow(
            folder / "home",
            sqlalchemy_url(psycopg.conninfo.make_conninfo(conninfo, dbname="airflow")),
            folder / "dags",
            {"here": airflow_connection(conninfo), "spark_default": server.connection},
        )
        running.enter_context(airflow)
        for dag in ("floor", "one_a_run"):
            airflow.unpause(dag)
        with section(f"{CHANGES} changes from their commit to the result, each time a run of the DAG"):
            compare(airflow, conninfo, connection, report)


def compare(
    airflow: LocalAirflow, conninfo: str, connection: psycopg.Connection[Any], report: Report
) -> None:
    rows = flights.movements(2)[:CHANGES]

    def floor() -> float:
        known, began = len(ended(airflow, "floor")), datetime.now(UTC)
        airflow.update_asset("floor")
        wait_until(lambda: len(ended(airflow, "floor")) > known, "a run of the floor")
        return max(ended(airflow, "floor")).timestamp() - began.timestamp()

    def batch() -> float:
        done = counted(connection)
        flights.replay(conninfo, rows, 1, lambda _: None, minutes=A_DAY)
        began = time.monotonic()
        wait_until(lambda: counted(connection) == done + CHANGES, "the result")
        return time.monotonic() - began

    for work in (floor, batch) * WARMING:
        work()
    figures = side_by_side(ROUNDS, batch, floor)
    for name, row in zip(
        ("commit to result", "an event of an asset to the end of a task that does nothing"),
        figures,
        strict=True,
    ):
        report.say(name, sorted(row)[ROUNDS // 2], "s")
    report.say("ours / Airflow's floor", ratio(*figures), "x")


def ended(airflow: LocalAirflow, dag: str) -> list[datetime]:
    return [datetime.fromisoformat(run["end_date"]) for run in airflow.runs(dag) if run["state"] == "success"]


def counted(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute(
        "select coalesce(sum(departures + arrivals + cancellations), 0)::bigint from public.route_delay"
    ).fetchone()
    return int(row[0]) if row else 0
