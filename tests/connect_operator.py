"""A Spark operator over a small ledger. The test writes the application as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators.spark import SparkBatchOperator
from tests.quick_spark import ROOT

FEED = CommitFeed("delays", 0)
PASSWORD = "hunter2-of-the-airline"
LEDGER = """
create table ledger (id bigint generated always as identity primary key, amount bigint not null default 1);
select revision.track('ledger', branch_id => '0');
create table total (what text primary key, n bigint not null);
insert into ledger select from generate_series(1, 5)
"""
ADD_UP = """
from pyspark.sql import functions as f
from airflow_pgchange.spark import batch_job
with batch_job() as job:
    rows = job.rows("public.ledger", key="id").groupBy(f.lit("all").alias("what"))
    job.merge(rows.agg(f.sum("amount").alias("n")), into="public.total", key="what", mode="add")
"""
BUSY = """
import os, pathlib, subprocess
from airflow_pgchange.spark.entry_point import batch_job
with batch_job() as job:
    child = subprocess.Popen(["sleep", "3600"])
    pathlib.Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
    job.spark.sql("select java_method('java.lang.Thread', 'sleep', 3600000L)").collect()
"""
"""Run code on the server and in a child process for an hour. Write the process ids to the file ``pids``."""

MakeOperator = Callable[..., SparkBatchOperator]


def airline(conninfo: str) -> str:
    """A database as an Airflow connection with a password."""
    server = conninfo_to_dict(conninfo)
    uri = f"postgres://postgres:{PASSWORD}@{server['host']}:{server['port']}/{server['dbname']}"
    return f"{uri}?application_name=airline"


def make_operator(folder: Path, text: str, **arguments: Any) -> SparkBatchOperator:
    application = folder / "application.py"
    application.write_text(text)
    given = {"feed": FEED, "postgres_conn_id": "airline", "application": str(application), **arguments}
    given["env_vars"] = {"PYTHONPATH": str(ROOT), **(given.get("env_vars") or {})}
    return SparkBatchOperator(task_id="aggregate", **given)


def run(task: SparkBatchOperator) -> dict[str, Any]:
    return task.execute({})  # type: ignore[typeddict-item]
