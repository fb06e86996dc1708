"""A Spark operator over five changes. A test writes the application, and a script replaces spark-submit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_pgchange.errors import Stopped
from airflow_pgchange.operators.spark import SparkBatchOperator
from tests.connect_operator import FEED, LEDGER, airline, run
from tests.quick_spark import ROOT
from tests.suite.processes import runs

Connect = Callable[..., psycopg.Connection[Any]]
MakeOperator = Callable[..., SparkBatchOperator]

SUBMIT = f"""#!{sys.executable}
import os, subprocess, sys
open(os.environ["SEEN"], "w").write(repr((sys.argv, {{k: v for k, v in os.environ.items() if "AIRFLOW" not in k}})))
application = next(argument for argument in sys.argv if argument.endswith("application.py"))
sys.exit(subprocess.run([sys.executable, application]).returncode)
"""

WELL = """
from airflow_pgchange.results.merge import write_manifest
from airflow_pgchange.spark.request import take
request = take()
print(request.batch.count, "changes")
write_manifest(request.manifest, [])
"""

FOREVER = """
import os, time
open(os.environ["PID"], "w").write(str(os.getpid()))
while True:
    time.sleep(1)
"""


def operators(db: str, connect: Connect, folder: Path, monkeypatch: pytest.MonkeyPatch) -> MakeOperator:
    """Return a function that creates an operator whose application is a given text."""
    connect().execute(LEDGER)
    submit, application = folder / "spark-submit", folder / "application.py"
    submit.write_text(SUBMIT)
    submit.chmod(0o755)
    for name, value in {
        "AIRFLOW_CONN_AIRLINE": airline(db),
        "AIRFLOW_CONN_SPARK_DEFAULT": "spark://local%5B1%5D",
        "SEEN": str(folder / "seen"),
        "PID": str(folder / "pid"),
        "PYTHONPATH": str(ROOT),
    }.items():
        monkeypatch.setenv(name, value)

    def make(text: str, **arguments: Any) -> SparkBatchOperator:
        application.write_text(text)
        given = {"feed": FEED, "postgres_conn_id": "airline", "spark_binary": str(submit), **arguments}
        return SparkBatchOperator(task_id="aggregate", application=str(application), **given)

    return make


def in_background(task: SparkBatchOperator) -> threading.Thread:
    """Run a task in a thread. The test will kill the task."""

    def target() -> None:
        with pytest.raises(Stopped):
            run(task)

    thread = threading.Thread(target=target)
    thread.start()
    return thread


def job_of(folder: Path) -> int:
    """Wait until the job's process runs, and return its id.

    The wait is long, because the process may import Airflow first.
    """
    deadline = time.monotonic() + 120
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.02)
    return int((folder / "pid").read_text())


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while runs(pid):
        assert time.monotonic() < deadline, "the job lives on"
        time.sleep(0.02)


def attempts(connect: Connect) -> list[tuple[Any, ...]]:
    return connect().execute("select attempt from pgchange.claim").fetchall()
