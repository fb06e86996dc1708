"""A whole Airflow: API server, scheduler, DAG processor and triggerer, on a real server."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.admin import schema
from airflow_pgchange.assets.targets import table_asset
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from demo.airflow import LocalAirflow, airflow_connection
from demo.postgres import Cluster
from tests.job_server import JobServer

DAGS = Path(__file__).parent / "dags"
BY_HAND = CommitFeed("by_hand", 0)
PATIENCE = 200.0
SETTINGS = {
    "TRIGGERER__JOB_HEARTBEAT_SEC": "2",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
}
"""With these seconds another triggerer soon takes over the triggers of a dead triggerer. The default is half a minute."""
JOB = """
import os, time
import psycopg
from airflow_pgchange.detached import Handle, batch_of, renewed
from airflow_pgchange.results import manifests

database, handle = os.environ["PGCHANGE_RESULTS"], Handle.from_text(os.environ["PGCHANGE_HANDLE"])
with psycopg.connect(database, autocommit=True) as connection, renewed(handle, database):
    while not connection.execute("select exists (select from finish)").fetchone()[0]:
        time.sleep(0.2)
    manifests.keep(connection, batch_of(handle, database), ())
"""
"""The application of a detached batch, in place of a job on a cluster. It works until the test lets it finish."""


@pytest.fixture
def airline(cluster: Cluster) -> Iterator[psycopg.Connection[Any]]:
    """A database with a tracked table without rows, and a second database for Airflow itself."""
    name = f"airline_{secrets.token_hex(4)}"
    with psycopg.connect(cluster.conninfo(), autocommit=True) as admin:
        for each in (name, f"{name}_airflow"):
            admin.execute(f"create database {each}")
    with psycopg.connect(cluster.conninfo(name), autocommit=True) as connection:
        schema.install(connection)
        connection.execute(
            "create table ledger (id bigint generated always as identity primary key);"
            "create table noted (id bigint, feed text, primary key (feed, id));"
            "create table go (); create table finish ();"
            "select revision.track('ledger', branch_id => '0')"
        )
        yield connection
    with psycopg.connect(cluster.conninfo(), autocommit=True) as admin:
        for each in (name, f"{name}_airflow"):
            admin.execute(f"drop database {each} with (force)")


@pytest.fixture
def airflow(
    airline: psycopg.Connection[Any], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalAirflow]:
    server = conninfo_to_dict(cluster.conninfo())
    metadata = (
        f"postgresql+psycopg2://postgres@{server['host']}:{server['port']}/{airline.info.dbname}_airflow"
    )
    home = tmp_path_factory.mktemp("airflow")
    results = cluster.conninfo(airline.info.dbname)
    job = home / "job.py"
    job.write_text(JOB)
    settings = {
        **SETTINGS,
        "PGCHANGE_TESTS__NOTES": table_asset(cluster.conninfo(), airline.info.dbname, "public", "noted").uri,
        "PGCHANGE_TESTS__JOB": str(job),
        "PGCHANGE_TESTS__RESULTS": results,
    }
    with JobServer() as jobs:
        connections = {
            "airline": airflow_connection(results),
            "spark_default": json.loads(jobs.connection),
        }
        with LocalAirflow(home, metadata, DAGS, connections, settings) as running:
            yield running


def write(airline: psycopg.Connection[Any], rows: int) -> None:
    airline.execute("insert into ledger select from generate_series(1, %s)", [rows])


def total(airline: psycopg.Connection[Any], query: str) -> int:
    row = airline.execute(query).fetchone()
    return int(row[0]) if row else 0


def eventually(condition: Callable[[], bool], what: str, airflow: LocalAirflow) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(
                f"not within {PATIENCE:g} s: {what}\n{airflow.log_tail('scheduler')}\n{airflow.log_tail('triggerer')}"
            )
        # A condition may query the API server, which takes CPU from the component that must act.
        time.sleep(0.5)


def process(airline: psycopg.Connection[Any], limit: int, feed: CommitFeed = BY_HAND) -> int:
    """Process one batch of a consumer that no DAG processes."""
    with ConsumerTransaction(feed, airline.info.dsn) as transaction:
        batch = transaction.claim(limit)
        if batch is None:
            return 0
        transaction.ack()
        return batch.count


def state(airflow: LocalAirflow, dag_id: str, run_id: str, task_id: str) -> str | None:
    found = {ti["task_id"]: ti["state"] for ti in airflow.task_instances(dag_id, run_id)}
    return found.get(task_id)


def unread(airline: psycopg.Connection[Any], feed: str) -> bool:
    missing = "select count(*) from ledger where id not in (select id from noted where feed = '{}')"
    return total(airline, missing.format(feed)) > 0


def an_insert_starts_a_run_and_ten_rows_in_one_transaction_leave_nothing_stranded(
    airflow: LocalAirflow, airline: psycopg.Connection[Any]
) -> None:
    eventually(lambda: watched(airline), "a watcher asks the database", airflow)
    assert airflow.runs("noted") == []
    write(airline, 10)
    eventually(
        lambda: not unread(airline, "commits:noted/0"), "ten rows in batches of four are noted", airflow
    )
    assert {run["run_type"] for run in airflow.runs("noted")} == {"asset_triggered"}


def a_dag_on_a_table_runs_after_a_batch_wrote_it(
    airflow: LocalAirflow, airline: psycopg.Connection[Any]
) -> None:
    eventually(
        lambda: "success" in {run["state"] for run in airflow.runs("after_notes")},
        "a DAG on the table of notes has run",
        airflow,
    )


def watched(airline: psycopg.Connection[Any]) -> bool:
    return (
        total(airline, "select count(*) from pg_stat_activity where application_name = 'airflow_pgchange'")
        > 0
    )


def a_long_batch_gives_at_most_two_asset_events(
    airflow: LocalAirflow, airline: psycopg.Connection[Any]
) -> None:
    # This DAG is not part of the scene, and its runs would take CPU.
    airflow.pause("noted")
    write(airline, 1)
    eventually(lambda: at_work(airline, "slow"), "the slow consumer is at work", airflow)
    for _ in range(10):
        write(airline, 1)
        time.sleep(0.5)
    airline.execute("insert into go default values")
    eventually(lambda: not unread(airline, "commits:slow/0"), "the slow consumer has caught up", airflow)
    events = Counter(event["name"] for event in airflow.asset_events())
    assert 1 <= events["airline/slow/0"] <= 2


def at_work(airline: psycopg.Connection[Any], consumer: str) -> bool:
    return airline.execute("select pubsub.locked(%s, 0)", [consumer]).fetchone() == (True,)


def a_triggerer_that_restarts_keeps_the_point_of_a_sensor(
    airflow: LocalAirflow, airline: psycopg.Connection[Any]
) -> None:
    process(airline, 1000)
    write(airline, 3)
    airflow.unpause("waits")
    run = airflow.trigger("waits")
    eventually(
        lambda: state(airflow, "waits", run, "for_the_consumer") == "deferred", "the sensor waits", airflow
    )
    airflow.kill_component("triggerer")
    write(airline, 5)
    airflow.start_component("triggerer")
    assert process(airline, 3) == 3
    eventually(
        lambda: state(airflow, "waits", run, "for_the_consumer") == "success",
        "the sensor has seen it",
        airflow,
    )
    assert process(airline, 1000) == 5


def another_triggerer_watches_the_feeds_of_a_dead_triggerer(
    airflow: LocalAirflow, airline: psycopg.Connection[Any]
) -> None:
    airflow.unpause("noted")
    eventually(lambda: not unread(airline, "commits:noted/0"), "nothing is left to note", airflow)
    airflow.start_component("triggerer", called="second triggerer")
    eventually(lambda: triggerers(airflow) == 2, "two triggerers run", airflow)
    airflow.kill_component("triggerer")
    write(airline, 1)
    killed = time.monotonic()
    eventually(lambda: not unread(airline, "commits:noted/0"), "the change is noted", airflow)
    print(f"noted {time.monotonic() - killed:.1f} s after the death of the triggerer that watched")
    airflow.start_component("triggerer")
    airflow.pause("noted")


def triggerers(airflow: LocalAirflow) -> int:
    """How many triggerers have a heartbeat that Airflow takes for alive."""
    with psycopg.connect(airflow.metadata_url.replace("+psycopg2", "")) as connection:
        row = connection.execute(
            "select count(*) from job where job_type = 'TriggererJob' and state = 'running' "
            "and latest_heartbeat > now() - interval '10 s'"
        ).fetchone()
    return int(row[0]) if row else 0


def a_deferred_sensor_ends_when_a_change_comes(
    airflow: LocalAirflow, airline: psycopg.Connection[Any]
) -> None:
    process(airline, 1000, CommitFeed("patient", 0))
    airflow.unpause("waits_for_changes")
    run = airflow.trigger("waits_for_changes")
    task = ("waits_for_changes", run, "for_changes")
    eventually(lambda: state(airflow, *task) == "deferred", "the sensor waits", airflow)
    write(airline, 1)
    eventually(lambda: state(airflow, *task) == "success", "the sensor has ended", airflow)
    process(airline, 1000)


def a_rescheduled_sensor_keeps_its_point(airflow: LocalAirflow, airline: psycopg.Connection[Any]) -> None:
    write(airline, 3)
    airflow.unpause("waits_by_reschedule")
    run = airflow.trigger("waits_by_reschedule")
    task = ("waits_by_reschedule", run, "for_the_consumer")
    eventually(lambda: state(airflow, *task) == "up_for_reschedule", "the sensor waits", airflow)
    write(airline, 5)
    assert process(airline, 3) == 3
    eventually(lambda: state(airflow, *task) == "success", "the sensor has seen it", airflow)
    assert process(airline, 1000) == 5


def a_mapped_task_works_on_each_feed(airflow: LocalAirflow, airline: psycopg.Connection[Any]) -> None:
    write(airline, 1)
    airflow.unpause("mapped")
    run = airflow.trigger("mapped")

    def done() -> bool:
        return [ti["state"] for ti in airflow.task_instances("mapped", run)] == ["success", "success"]

    eventually(done, "both mapped tasks have ended", airflow)
    assert not unread(airline, "commits:left/0")
    assert not unread(airline, "commits:right/0")


def a_driver_elsewhere_takes_no_worker_slot(airflow: LocalAirflow, airline: psycopg.Connection[Any]) -> None:
    run = with_a_driver_at_work(airflow, airline)
    airline.execute("insert into finish default values")
    acked_by(run, airflow, airline)


def a_driver_elsewhere_outlives_scheduler_and_triggerer(
    airflow: LocalAirflow, airline: psycopg.Connection[Any]
) -> None:
    run = with_a_driver_at_work(airflow, airline)
    for name in ("scheduler", "triggerer"):
        airflow.kill_component(name)
    airline.execute("insert into finish default values")
    for name in ("scheduler", "triggerer"):
        airflow.start_component(name)
    acked_by(run, airflow, airline)


def with_a_driver_at_work(airflow: LocalAirflow, airline: psycopg.Connection[Any]) -> str:
    """Start a run, and return it when its task is deferred and its driver works."""
    write(airline, 1)
    airflow.unpause("elsewhere")
    run = airflow.trigger("elsewhere")
    task = ("elsewhere", run, "driver")
    eventually(lambda: state(airflow, *task) == "deferred", "a task waits for its driver", airflow)
    eventually(lambda: is_reported(airflow, run), "the scheduler knows it", airflow)
    assert leased(airline) == 1
    return run


def is_reported(airflow: LocalAirflow, run: str) -> bool:
    """Whether the scheduler knows that the process of a run's task has ended.

    If a deferred task is resumed before that, Airflow 3.1 fails it, because its state does not fit the report.
    """
    lines = (airflow.home / "scheduler.log").read_text(errors="replace").splitlines()
    return any("Received executor event" in line and run in line for line in lines)


def acked_by(run: str, airflow: LocalAirflow, airline: psycopg.Connection[Any]) -> None:
    task = ("elsewhere", run, "driver")
    eventually(lambda: state(airflow, *task) == "success", "the batch of a driver is acked", airflow)
    assert leased(airline) == 0
    assert (
        total(airline, "select max(attempt) from pgchange.batch where consumer = 'commits:elsewhere/0'") == 1
    )


def leased(airline: psycopg.Connection[Any]) -> int:
    query = "select count(*) from pgchange.status() where consumer = 'commits:elsewhere/0' and at_work"
    return total(airline, query)


ALWAYS = (
    an_insert_starts_a_run_and_ten_rows_in_one_transaction_leave_nothing_stranded,
    a_dag_on_a_table_runs_after_a_batch_wrote_it,
    a_long_batch_gives_at_most_two_asset_events,
    a_driver_elsewhere_takes_no_worker_slot,
)
AT_A_RELEASE = (
    another_triggerer_watches_the_feeds_of_a_dead_triggerer,
    a_deferred_sensor_ends_when_a_change_comes,
    a_triggerer_that_restarts_keeps_the_point_of_a_sensor,
    a_rescheduled_sensor_keeps_its_point,
    a_mapped_task_works_on_each_feed,
    a_driver_elsewhere_outlives_scheduler_and_triggerer,
)
ELSEWHERE = (
    "every run has test_airflow_sensors.py, where a point outlives a deferral and a restart, "
    "and test_dags.py, where tasks are mapped over feeds"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "scenes",
    [
        pytest.param(ALWAYS, id="always"),
        pytest.param(AT_A_RELEASE, id="at a release", marks=pytest.mark.release(ELSEWHERE)),
    ],
)
def test_a_whole_airflow(
    airflow: LocalAirflow, airline: psycopg.Connection[Any], scenes: tuple[Callable[..., None], ...]
) -> None:
    """Takes minutes: each scene waits for processes of Airflow. Scenes share a test, because Airflow starts slowly."""
    failed = []
    for scene in scenes:
        try:
            scene(airflow, airline)
        except (AssertionError, pytest.fail.Exception) as error:
            error.add_note(f"in the scene {scene.__name__}")
            failed.append(error)
    if failed:
        raise BaseExceptionGroup("scenes that failed", failed)
