"""The Spark operator with detached=True, with a stand-in for a standalone master; and a claim that defers while it
waits."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import TaskDeferred

from airflow_pgchange import detached
from airflow_pgchange.detached import Handle
from airflow_pgchange.errors import (
    ApplicationFailed,
    BatchNotFinished,
    InvalidArgument,
    Leased,
    ServerUnavailable,
    StaleClaim,
)
from airflow_pgchange.feeds.connections import connect as open_connection
from airflow_pgchange.operators import ClaimBatchOperator
from airflow_pgchange.operators.spark import SparkBatchOperator
from airflow_pgchange.results import manifests
from airflow_pgchange.triggers.feed import IdleTrigger
from airflow_pgchange.triggers.spark_driver import DriverTrigger
from tests.airflow_home import uri
from tests.integration.airflow.test_airflow_detached import context
from tests.job_server import JobServer
from tests.ledger import FEED, Connect
from tests.waiting import until
from tests.watching import first

Write = Callable[[int], None]
LEASE = 600


@pytest.fixture
def master(conn_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobServer]:
    with JobServer() as server:
        server.starts_jobs, server.state = False, "RUNNING"
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", server.connection)
        yield server


@pytest.fixture
def nothing_held(write: Write, connect: Connect) -> Callable[[], None]:
    """A function that waits until only the sessions of the test are open and no advisory lock is held."""
    connection = connect()
    sessions = "select count(*) from pg_stat_activity where datname = current_database()"
    row = connection.execute(sessions).fetchone()
    assert row is not None
    locks = "select from pg_locks where locktype = 'advisory'"
    return lambda: until(connection, f"select ({sessions}) = {row[0]} and not exists ({locks})")


def operator(**arguments: Any) -> SparkBatchOperator:
    given = {"feed": FEED, "postgres_conn_id": "airline", "application": "/jobs/sums.py", "lease": LEASE}
    return SparkBatchOperator(task_id="sums", detached=True, **{**given, **arguments})


def started(**arguments: Any) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as deferred:
        operator(**arguments).execute(context())  # type: ignore[arg-type]
    return deferred.value


def resumed(deferral: TaskDeferred, event: dict[str, Any]) -> dict[str, Any]:
    told = {"handle": str(handle_of(deferral)), "driver": "driver-1", **event}
    return getattr(operator(), deferral.method_name)(context(), told)  # type: ignore[no-any-return]


def handle_of(deferral: TaskDeferred) -> Handle:
    return Handle.from_text(deferral.trigger.serialize()[1]["handle"])


def finish_job(deferral: TaskDeferred, db: str) -> None:
    """Record that the application of the batch has finished and has staged nothing."""
    with open_connection(db) as connection:
        manifests.keep(connection, detached.batch_of(handle_of(deferral), db), ())


def claimed_by_another(db: str) -> Handle | None:
    return detached.claim(FEED, db, lease=LEASE, owner="another")


def test_a_task_starts_a_driver_and_holds_nothing_while_it_runs(
    master: JobServer, write: Write, nothing_held: Callable[[], None], db: str
) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    write(3)
    given = {"py_files": "/jobs/mine.zip", "executor_memory": "2g", "conf": {"spark.cores.max": 4}}
    deferral = started(**given, env_vars={"COLOUR": "blue"}, application_args=["--day", "2026-01-31"])
    nothing_held()
    (request,) = master.requests
    properties = {
        "spark.master": "spark://127.0.0.1",
        "spark.app.name": "{{ dag.dag_id }}.{{ task.task_id }}",
        "spark.executor.memory": "2g",
        "spark.submit.pyFiles": "/jobs/mine.zip",
        "spark.cores.max": "4",
    }
    options = [part for name, value in properties.items() for part in ("--conf", f"{name}={value}")]
    assert sorted(request["appArgs"][:-3]) == sorted(options)
    assert request["appArgs"][-3:] == ["/jobs/sums.py", "--day", "2026-01-31"]
    assert (request["mainClass"], request["sparkProperties"]) == (
        "org.apache.spark.deploy.SparkSubmit",
        properties,
    )
    handle = handle_of(deferral)
    assert request["environmentVariables"] == {"COLOUR": "blue", "PGCHANGE_HANDLE": str(handle)}
    assert (handle.count, handle.attempt) == (3, 1)
    with pytest.raises(Leased, match="by d/today/claim"):
        claimed_by_another(db)


def test_a_driver_that_succeeded_is_acked_in_one_task(master: JobServer, write: Write, db: str) -> None:
    write(3)
    deferral = started()
    finish_job(deferral, db)
    done = resumed(deferral, {"state": "FINISHED"})
    assert (done["feed"], done["batches"], done["changes"]) == (FEED.name, 1, 3)
    assert claimed_by_another(db) is None


@pytest.mark.parametrize(
    ("state", "error"),
    [("FAILED", ApplicationFailed), ("LOST", ApplicationFailed), ("FINISHED", BatchNotFinished)],
)
def test_a_batch_whose_driver_failed_is_released_at_once(
    state: str, error: type[Exception], master: JobServer, write: Write, connect: Connect, db: str
) -> None:
    """A driver without a `batch_job()` block has left no results to merge."""
    write(1)
    with pytest.raises(error):
        resumed(started(), {"state": state})
    ((stored,),) = connect().execute("select error from pgchange.claim").fetchall()
    assert error.__name__ in stored
    again = claimed_by_another(db)
    assert again is not None
    assert again.attempt == 2


def test_an_attempt_that_is_over_ends_its_driver_and_writes_nothing(
    master: JobServer, write: Write, db: str
) -> None:
    write(1)
    deferral = started(lease=0.001)
    finish_job(deferral, db)
    time.sleep(0.01)
    assert claimed_by_another(db) is not None
    event = asyncio.run(first(deferral.trigger))
    assert "stale" in event
    with pytest.raises(StaleClaim):
        resumed(deferral, event)
    assert master.killed == ["driver-1"]


async def test_the_lease_is_renewed_until_the_driver_has_ended(
    master: JobServer, write: Write, nothing_held: Callable[[], None], db: str
) -> None:
    """Takes seconds: the lease has to end if it is not renewed."""
    write(1)
    deferral = await asyncio.to_thread(started, lease=1.5, status_poll_interval=0.05)
    trigger = DriverTrigger(**deferral.trigger.serialize()[1])
    waiting = asyncio.create_task(first(trigger))
    await asyncio.sleep(1.8)
    with pytest.raises(Leased):
        await asyncio.to_thread(claimed_by_another, db)
    # Between two renewals there is no connection.
    await asyncio.to_thread(nothing_held)
    assert not waiting.done()
    master.state = "FAILED"
    assert (await waiting)["state"] == "FAILED"


async def test_a_driver_that_no_master_knows_is_lost_but_a_master_that_is_away_is_waited_for(
    master: JobServer, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)
    deferral = await asyncio.to_thread(started)
    given = deferral.trigger.serialize()[1] | {"poll_interval": 0.02}
    away = DriverTrigger(**given | {"masters": ["http://127.0.0.1:1"]})
    waiting = asyncio.create_task(first(away))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    waiting.cancel()
    master.knows_jobs = False
    both = DriverTrigger(**given | {"masters": ["http://127.0.0.1:1", master.url]})
    assert (await first(both))["state"] == "LOST"


async def test_a_person_who_ends_the_task_ends_the_driver_and_the_lease(
    master: JobServer, write: Write, db: str
) -> None:
    write(1)
    deferral = await asyncio.to_thread(started)
    await DriverTrigger(**deferral.trigger.serialize()[1]).on_kill()
    assert master.killed == ["driver-1"]
    again = await asyncio.to_thread(claimed_by_another, db)
    assert again is not None
    assert again.attempt == 2


@pytest.mark.parametrize("host", ["local[2]", "yarn", "k8s://https://127.0.0.1"])
def test_a_master_that_starts_no_drivers_is_refused_before_a_claim(
    host: str, master: JobServer, write: Write, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": host}))
    with pytest.raises(InvalidArgument, match="Use claimed_batch around an operator for that cluster"):
        operator().execute(context())  # type: ignore[arg-type]
    handle = claimed_by_another(db)
    assert handle is not None
    assert handle.attempt == 1


@pytest.mark.parametrize(
    "argument", [{"max_batches": None}, {"catalogue_conn_id": "c"}, {"keytab": "k"}, {"java_class": "C"}]
)
def test_an_argument_without_effect_is_refused(argument: dict[str, Any], master: JobServer) -> None:
    with pytest.raises(InvalidArgument, match="leave"):
        operator(**argument).execute(context())  # type: ignore[arg-type]


def test_a_batch_whose_driver_cannot_be_started_is_released_as_after_an_outage(
    conn_id: str, write: Write, connect: Connect, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)
    nobody = {"conn_type": "spark", "host": "spark://127.0.0.1", "extra": {"rest-port": 1}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(nobody))
    with pytest.raises(ServerUnavailable, match="Set spark.master.rest.enabled=true"):
        operator().execute(context())  # type: ignore[arg-type]
    assert connect().execute("select failures, outages from pgchange.claim").fetchall() == [(0, 1)]
    assert claimed_by_another(db) is not None


def test_a_task_without_a_batch_succeeds_and_starts_nothing(master: JobServer, write: Write) -> None:
    assert operator().execute(context())["batches"] == 0  # type: ignore[arg-type]
    assert master.requests == []


async def test_a_claim_waits_for_another_run_without_a_worker_slot(write: Write, db: str) -> None:
    write(1)
    other = await asyncio.to_thread(claimed_by_another, db)
    assert other is not None
    task = ClaimBatchOperator(
        task_id="claim", feed=FEED, postgres_conn_id="airline", deferrable=True, busy_timeout="1 hour"
    )
    with pytest.raises(TaskDeferred) as deferred:
        await asyncio.to_thread(task.execute, context())  # type: ignore[arg-type]
    deferral = deferred.value
    assert deferral.timeout is not None
    assert 3590 < deferral.timeout.total_seconds() <= 3600
    waiting = asyncio.create_task(first(IdleTrigger(**deferral.trigger.serialize()[1])))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await asyncio.to_thread(detached.release, other, db)
    event = await waiting
    resume = getattr(task, deferral.method_name)
    text = await asyncio.to_thread(resume, context(), event, **(deferral.kwargs or {}))
    assert Handle.from_text(text).attempt == 2


async def test_a_lease_is_waited_for_if_the_progress_is_in_another_database(
    write: Write, db: str, other_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is in the database of the changes, the lock in the other."""
    write(1)
    monkeypatch.setenv("AIRFLOW_CONN_ELSEWHERE", uri(other_db))
    other = await asyncio.to_thread(detached.claim, FEED, other_db, db, lease=LEASE, owner="another")
    assert other is not None
    waiting = asyncio.create_task(first(IdleTrigger(FEED, "elsewhere", "airline", poll_interval=0.05)))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await asyncio.to_thread(detached.release, other, other_db, db)
    assert (await waiting)["idle"]
