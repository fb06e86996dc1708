"""A process that runs the Spark operator as a task does, and stops at a step of the batch until it may go on.

``python -m tests.chaos.paused_operator '{"folder": ..., "step": ..., "separately": false}'``; the connections are in the
environment. At the step it leaves a file of the step's name in the folder, and waits for the file ``go``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

from tests import airflow_home

airflow_home.prepare()

import psycopg  # noqa: E402

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction  # noqa: E402
from airflow_pgchange.feeds.connections import connect  # noqa: E402
from airflow_pgchange.operators import spark, spark_connect  # noqa: E402
from tests.chaos.steps import follow_batches  # noqa: E402

given = json.loads(sys.argv[1])
FOLDER = Path(given["folder"])


def reached(step: str) -> None:
    with (FOLDER / "passed").open("a") as passed:
        passed.write(f"{step}\n")
    if step != given["step"]:
        return
    (FOLDER / step).touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.02)


def stopping_at(step: str, function: Any, *, before: bool = False) -> Any:
    """Return the function with a pause at the step, right before or right after its call."""

    @wraps(function)
    def stepped(*arguments: Any, **named: Any) -> Any:
        if before:
            reached(step)
        result = function(*arguments, **named)
        if not before:
            reached(step)
        return result

    return stepped


def commit_results_first(transaction: ConsumerTransaction, write: Any) -> None:
    """The planted fault: results in one transaction, progress in the next."""
    with connect(transaction._results, primary=True) as other, other.transaction():
        write(other)
    reached("merged")
    acknowledge(transaction)


# The test takes the place of Airflow's worker, which keeps the fork server alive for all of its tasks.
spark_connect.keeper = os.getppid
acknowledge = ConsumerTransaction.ack
follow_batches(reached, ("acked", "committed"))
if given["separately"]:
    ConsumerTransaction.ack = commit_results_first  # type: ignore[method-assign, assignment]
else:
    spark.merge = stopping_at("merged", spark.merge)
spark.read_manifest = stopping_at("ended", spark.read_manifest, before=True)
spark.SparkBatchOperator._submission_of = stopping_at(  # type: ignore[method-assign]
    "claimed", spark.SparkBatchOperator._submission_of, before=True
)
spark_connect.application = stopping_at("claimed", spark_connect.application, before=True)

task = spark.SparkBatchOperator(
    task_id="count",
    feed=CommitFeed("kills", given["branch"]),
    postgres_conn_id="results",
    source_conn_id=given["source"],
    application=str(FOLDER / "application.py"),
    conf=given["conf"],
    max_batches=None,
)
task.ping_every = 1.0
try:
    print(json.dumps(task.execute({})))  # type: ignore[typeddict-item]
except psycopg.Error as error:
    sys.exit(f"not translated: {error!r}")
