"""The job of the Spark operator ends with its task, whatever ends the task. A script stands in for spark-submit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from airflow_pgchange.errors import ConnectionLost, Stopped
from tests.connect_operator import run
from tests.submit_operator import (
    FOREVER,
    WELL,
    Connect,
    MakeOperator,
    attempts,
    in_background,
    job_of,
    wait_for_end,
)
from tests.waiting import until


def test_a_task_that_is_killed_after_its_job_has_ended_kills_nobody(
    operator: MakeOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    task = operator(WELL)
    run(task)
    task.on_kill()
    assert killed == []


def test_a_killed_task_ends_its_job_and_what_the_job_started(operator: MakeOperator, tmp_path: Path) -> None:
    task = operator(FOREVER)
    thread = in_background(task)
    job = job_of(tmp_path)
    task.on_kill()
    thread.join()
    wait_for_end(job)


def test_temporary_files_of_a_killed_job_are_removed(
    operator: MakeOperator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    keep = """
import os, pathlib
given = os.environ["SPARK_SUBMIT_OPTS"]
pathlib.Path(given.split("=", 1)[1].strip('"'), "spark-blocks").mkdir()
"""
    task = operator(keep + FOREVER)
    thread = in_background(task)
    job_of(tmp_path)
    kept = list(scratch.glob("*/spark-blocks"))
    task.on_kill()
    thread.join()
    assert (len(kept), list(scratch.iterdir())) == (1, [])


def test_a_killed_task_says_so_and_keeps_nothing(operator: MakeOperator, tmp_path: Path) -> None:
    task = operator(FOREVER)
    killer = threading.Thread(target=lambda: (job_of(tmp_path), task.on_kill()))
    killer.start()
    with pytest.raises(Stopped, match="killed"):
        run(task)
    killer.join()
    assert run(operator(WELL))["changes"] == 5


def test_a_task_killed_while_it_merges_keeps_nothing(
    operator: MakeOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = operator(WELL)
    with monkeypatch.context() as patched:
        patched.setattr("airflow_pgchange.operators.spark.merge", lambda *_: task.on_kill())
        with pytest.raises(Stopped, match="killed"):
            run(task)
    assert run(operator(WELL))["changes"] == 5


def test_a_lost_connection_ends_the_job(operator: MakeOperator, connect: Connect, tmp_path: Path) -> None:
    task = operator(FOREVER)
    task.ping_every = 0.1

    def cut() -> None:
        job_of(tmp_path)
        # Between two of the short pings of the operator.
        until(
            connect(),
            "select count(pg_terminate_backend(pid)) > 0 from pg_stat_activity where application_name = 'airline' "
            "and datname = current_database() and state = 'idle in transaction'",
        )

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(ConnectionLost):
        run(task)
    cutter.join()
    wait_for_end(job_of(tmp_path))


OPERATOR = """
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators.spark import SparkBatchOperator
SparkBatchOperator(
    task_id="aggregate", feed=CommitFeed("delays", 0), postgres_conn_id="airline",
    application={application!r}, spark_binary={submit!r},
).execute({{}})
"""


def test_an_operator_that_is_killed_outright_takes_its_job_with_it(
    operator: MakeOperator, connect: Connect, tmp_path: Path
) -> None:
    """Takes seconds: a JVM has to be at work before its operator is killed."""
    follow = "from airflow_pgchange.spark.parent_process import follow_parent; follow_parent()\n"
    operator(follow + FOREVER)
    text = OPERATOR.format(
        application=str(tmp_path / "application.py"), submit=str(tmp_path / "spark-submit")
    )
    process = subprocess.Popen([sys.executable, "-c", text], env=os.environ)
    job = job_of(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for_end(job)
    assert run(operator(WELL))["changes"] == 5
    assert attempts(connect) == [(2,)]
