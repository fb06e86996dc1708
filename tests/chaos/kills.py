"""Kills of processes at each step of a batch, and the ledger that shows whether each change counted once.

A batch is a row of a ledger a change; its job adds the amounts of each account to a total and copies the ids. Where one
change is lost or doubled, totals and copies differ from the ledger.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from demo.postgres import Cluster
from demo.spark import clean_environment
from tests import quick_spark, spark_server
from tests.airflow_home import uri
from tests.chaos import killed_lakes
from tests.suite.processes import runs

ROOT = Path(__file__).parent.parent.parent
STEPS = ("claimed", "opened", "reading", "staging", "written", "ended", "merged", "acked", "committed")
"""The steps of a batch, in order. At ``written`` the manifest exists, too, and the driver still runs."""
VICTIMS: Mapping[str, tuple[str, ...]] = {
    "operator": STEPS,
    "PostgreSQL": STEPS,
    "source": STEPS,
    "driver": ("opened", "reading", "staging", "written"),
    "driver's Python": ("opened", "reading", "staging", "written"),
    "cluster's driver": ("reading", "staging"),
    "executor": ("reading", "staging"),
}
"""By victim: the steps at which the victim runs.

``PostgreSQL`` is the server of the results, and ``source`` the server of the changes if there are two servers.
"""
IN_A_CLUSTER = ("cluster's driver", "executor")
SHARED = "shared"
"""The name that stands for the Spark Connect server of the whole run.

It is used in place of a master, and saves the start of a JVM.
"""
OF_A_DRIVER = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "600m",
    **quick_spark.QUICK,
}
"""Settings of a driver that the operator starts. The shared server has settings of its own."""
PATIENCE = 180.0

TABLES = """
create table public.ledger (id bigint generated always as identity primary key, account integer, amount integer);
"""
RESULTS = """
create table public.total (account integer primary key, changes bigint, amount bigint);
create table public.copied (id bigint);
"""
APPLICATION = """
import os, pathlib, time
from pyspark import TaskContext
from pyspark.sql import functions as f
from airflow_pgchange.lake import Delta, Iceberg, RemoteIceberg
from airflow_pgchange.spark.entry_point import batch_job

FOLDER, STEP = pathlib.Path({folder!r}), {step!r}

def reached(step, who=""):
    with (FOLDER / "passed").open("a") as passed:
        passed.write(step + "\\n")
    if step == STEP and not (FOLDER / "go").exists():
        (FOLDER / step).write_text(str(who))
        while not (FOLDER / "go").exists():
            time.sleep(0.02)

def pausing(step):
    def pause(batches):
        for number, batch in enumerate(batches):
            half = batch.num_rows // 2
            yield batch.slice(0, half)
            task = TaskContext.get()
            if number == 0 and task.partitionId() == 0:
                (FOLDER / f"{{step}}-attempt-{{task.attemptNumber()}}").touch()
                reached(step, os.getpid())
            yield batch.slice(half)
    return pause

(FOLDER / "python").write_text(str(os.getpid()))
(FOLDER / "driver").write_text(str(os.getppid()))
with batch_job() as job:
    reached("opened")
    rows = job.rows("public.ledger", key="id").select("id", "account", "amount")
    read = rows.mapInArrow(pausing("reading"), rows.schema)
    totals = read.groupBy("account").agg(f.count("*").alias("changes"), f.sum("amount").alias("amount"))
    job.merge(totals, into="public.total", key="account", mode="add")
    ids = rows.select("id")
    for lake in {lakes!r}:
        job.merge(ids, into=lake, key=[], mode="append")
    job.merge(ids.mapInArrow(pausing("staging"), ids.schema), into="public.copied", key=[], mode="append")
reached("written")
"""


@dataclass(frozen=True)
class Scene:
    """Two databases, source and results, and a feed whose first batch is processed.

    ``folder`` holds the signals of a run. With ``lakes``, the ids are also copied into tables of a lake.
    """

    source: Cluster
    results: Cluster
    branch: int
    folder: Path
    lakes: bool = False

    @property
    def feed(self) -> CommitFeed:
        return CommitFeed("kills", self.branch)


def set_up(source: Cluster, results: Cluster, folder: Path, changes: int, *, lakes: bool = False) -> Scene:
    """Create a ledger of two batches, and process the first."""
    with psycopg.connect(source.conninfo(), autocommit=True) as connection:
        connection.execute(TABLES)
        row = connection.execute("select revision.track('public.ledger')").fetchone()
    assert row is not None
    with psycopg.connect(results.conninfo(), autocommit=True) as connection:
        connection.execute(RESULTS)
    if lakes:
        killed_lakes.create(results.conninfo(), folder)
    scene = Scene(source, results, row[0], folder, lakes)
    write(scene, 100)
    with ConsumerTransaction(scene.feed, results.conninfo(), source.conninfo()) as first:
        batch = first.claim(1_000_000)
        assert batch is not None
        ids = [change.id for change in first.changes()]

        def keep(connection: psycopg.Connection[object]) -> None:
            connection.execute("insert into copied select unnest(%s::bigint[])", [ids])
            connection.execute(
                "insert into total select id %% 7, count(*), sum(id %% 60) from unnest(%s::bigint[]) as id group by 1",
                [ids],
            )
            if lakes:
                killed_lakes.append(connection, batch, folder, ids)

        first.ack(keep)
    write(scene, changes)
    return scene


def write(scene: Scene, changes: int) -> None:
    with psycopg.connect(scene.source.conninfo(), autocommit=True) as connection:
        connection.execute(
            "insert into ledger (account, amount) select n %% 7, n %% 60 from ("
            "select coalesce((select max(id) from ledger), 0) + g as n from generate_series(1, %s) as g) as s",
            [changes],
        )


@contextmanager
def operator(
    scene: Scene, master: str, step: str | None, *, separately: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run the operator on the second batch, as a process. It stops at ``step``."""
    for name in ("go", "passed", "driver", "python", *STEPS):
        (scene.folder / name).unlink(missing_ok=True)
    tables = killed_lakes.tables(scene.folder) if scene.lakes else ()
    application = APPLICATION.format(folder=str(scene.folder), step=step, lakes=tables)
    (scene.folder / "application.py").write_text(application)
    apart = scene.source is not scene.results
    given = {
        "folder": str(scene.folder), "step": step, "branch": scene.branch, "separately": separately,
        "source": "source" if apart else None, "conf": {} if master == SHARED else OF_A_DRIVER,
    }  # fmt: skip
    environment = clean_environment() | {
        "AIRFLOW_CONN_RESULTS": uri(scene.results.conninfo()),
        "AIRFLOW_CONN_SOURCE": uri(scene.source.conninfo()),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(spark_connection(master)),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        **killed_lakes.environment(scene.folder),
        **(quick_spark.environment(scene.folder / "conf") if master.startswith("local") else {}),
    }
    log = scene.folder / f"operator-{step}.log"
    with log.open("w") as out, subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.paused_operator", json.dumps(given)],
        env=environment, cwd=scene.folder, stdout=out, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def spark_connection(master: str) -> dict[str, Any]:
    """Return the Airflow connection to a master, or to the shared server."""
    if master == SHARED:
        return spark_server.as_user_of_its_own().connection
    host, _, port = master.rpartition(":") if master.startswith("spark:") else (master, "", "")
    return {"conn_type": "spark", "host": host, **({"port": int(port)} if port else {})}


def wait_for_step(scene: Scene, process: subprocess.Popen[str], step: str) -> None:
    """Return when the run has stopped at the step."""
    deadline = time.monotonic() + PATIENCE
    while not (scene.folder / step).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the run never reached step {step!r}:\n{log_of(scene, step)}")
        time.sleep(0.02)
    assert process.poll() is None
    passed = dict.fromkeys((scene.folder / "passed").read_text().split())
    assert tuple(passed) == STEPS[: STEPS.index(step) + 1], tuple(passed)


def log_of(scene: Scene, step: str | None) -> str:
    return (scene.folder / f"operator-{step}.log").read_text()[-6000:]


def kill(victim: str, scene: Scene, process: subprocess.Popen[str], step: str) -> None:
    """Kill the victim with SIGKILL, check that it was alive, and wait until it is gone. Start PostgreSQL again."""
    if victim in ("PostgreSQL", "source"):
        crash(scene.results if victim == "PostgreSQL" else scene.source)
        return
    pid = {
        "operator": lambda: process.pid,
        "driver": lambda: told(scene, "driver"),
        "cluster's driver": lambda: told(scene, "driver"),
        "driver's Python": lambda: told(scene, "python"),
        "executor": lambda: executor_of(told(scene, step)),
    }[victim]()
    assert runs(pid), f"the {victim} was gone before it was killed"
    os.kill(pid, signal.SIGKILL)
    until(lambda: not runs(pid), f"the end of the {victim}")


def crash(cluster: Cluster) -> None:
    postmaster = int((cluster.data / "postmaster.pid").read_text().split()[0])
    assert runs(postmaster), "PostgreSQL was gone before it was killed"
    cluster.kill()
    assert not runs(postmaster)
    cluster.start()


def told(scene: Scene, name: str) -> int:
    """Return the process id that the run has written into the file ``name``."""
    return int((scene.folder / name).read_text())


def job_runs(scene: Scene) -> bool:
    """Return whether a process of the run's job is alive: the application, or a process in the session of its driver.

    Beside the shared server there is no driver, and the application's parent leads no session.
    """
    if not (scene.folder / "driver").exists():
        return False
    driver = told(scene, "driver")
    return runs(told(scene, "python")) or any(
        session_of(int(process.name)) == driver for process in Path("/proc").glob("[0-9]*")
    )


def session_of(pid: int) -> int | None:
    """Return the session of a running process."""
    with suppress(ProcessLookupError):
        return os.getsid(pid) if runs(pid) else None
    return None


def until(found: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not found():
        if time.monotonic() > deadline:
            raise AssertionError(f"still waiting for {what}")
        time.sleep(0.02)


def executor_of(worker: int) -> int:
    """Return the executor of a Python worker: its nearest ancestor that is a Java process."""
    pid = worker
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def attempts(scene: Scene, step: str) -> int:
    """Return how often Spark tried the task that stopped at the step."""
    return len(list(scene.folder.glob(f"{step}-attempt-*")))


@dataclass(frozen=True)
class Verdict:
    """Numbers of missing and of surplus ids in the copies of the ledger, and of accounts with a wrong total."""

    lost: int
    doubled: int
    wrong_totals: int


RIGHT = Verdict(0, 0, 0)


def judge(scene: Scene) -> Verdict:
    with psycopg.connect(scene.source.conninfo()) as connection:
        ids = {row[0] for row in connection.execute("select id from ledger")}
        ledger = set(
            connection.execute("select account, count(*), sum(amount) from ledger group by 1").fetchall()
        )
    with psycopg.connect(scene.results.conninfo()) as connection:
        copied = Counter(row[0] for row in connection.execute("select id from copied"))
        totals = set(connection.execute("select account, changes, amount from total").fetchall())
    copies = [copied]
    if scene.lakes:
        copies += killed_lakes.ids(scene.results.conninfo(), scene.folder).values()
    return Verdict(
        sum(len(ids - found.keys()) for found in copies),
        sum(found.total() - len(found) for found in copies),
        len(ledger ^ totals),
    )


def staging_left(scene: Scene) -> int:
    """Return the staging tables that remain after maintenance."""
    with psycopg.connect(scene.results.conninfo(), autocommit=True) as connection:
        connection.execute("select pgchange.drop_leftovers('0')")
        row = connection.execute("select count(*) from pgchange.staged_tables()").fetchone()
    return int(row[0]) if row else 0
