"""A function of a DAG file that processes a batch in Spark, on both kinds of connection."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading

import pytest
from airflow.sdk import DAG

from airflow_pgchange.decorators.spark import pgchange_spark_task
from airflow_pgchange.errors import InvalidArgument
from tests.connect_operator import FEED, LEDGER, airline
from tests.quick_spark import ROOT

DAG_FILE = """
import os
from airflow_pgchange.decorators.spark import pgchange_spark_task
from tests.connect_operator import FEED

COLUMN = "amount"

def added(frame):
    from pyspark.sql import functions as f
    return frame.agg(f.sum(COLUMN).alias("n"))

GIVEN = {"spark_binary": os.environ["SUBMIT"], "limit": 2, "max_batches": None}

@pgchange_spark_task(feed=FEED, postgres_conn_id="airline", **GIVEN)
def totals(job, what):
    with open(os.environ["SUBMIT"] + ".calls", "a") as calls:
        print(os.getpid(), file=calls)
    from pyspark.sql import functions as f
    rows = job.rows("public.ledger", key="id").groupBy(f.lit(what).alias("what"))
    job.merge(added(rows), into="public.total", key="what", mode="add")
"""
SUBMIT = f"""#!{sys.executable}
import os, runpy, sys, traceback
sys.argv = sys.argv[next(place for place, argument in enumerate(sys.argv) if argument.endswith("function.py")):]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except BaseException:
    traceback.print_exc()
    os._exit(1)
# Not as Python ends: what Spark's client asks of a server then may have no answer.
os._exit(0)
"""
"""Replaces spark-submit, and runs the application of the environment without a driver."""


@pytest.fixture
def ledger(db, connect, monkeypatch):
    """A ledger of five changes."""
    connection = connect()
    connection.execute(LEDGER)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", airline(db))
    return connection


@pytest.fixture
def totals(tmp_path, monkeypatch):
    """Return the decorated function of a DAG file. The file is loaded as by Airflow: under a name that no other process
    can import."""
    submit, file = tmp_path / "spark-submit", tmp_path / "ledger_dag.py"
    submit.write_text(SUBMIT)
    submit.chmod(0o755)
    file.write_text(DAG_FILE)
    monkeypatch.setenv("SUBMIT", str(submit))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    spec = importlib.util.spec_from_file_location("unusual_prefix_ledger_dag", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module.totals


@pytest.mark.parametrize("kind", ["spark", "spark_connect"])
def test_a_function_is_called_for_each_batch(connect_server, ledger, totals, tmp_path, monkeypatch, kind):
    """Takes seconds: a server of Spark may have to start."""
    if kind == "spark":
        monkeypatch.setenv(
            "AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "local[1]"})
        )
        monkeypatch.setenv("SPARK_REMOTE", connect_server.remote)
    with DAG("ledgers"):
        task = totals(what="all").operator
    task.render_template_fields({"dag": task.dag, "task": task})
    assert task.execute({})["batches"] == 3
    calls = (tmp_path / "spark-submit.calls").read_text().split()
    assert (len(calls), len(set(calls))) == (3, 1)
    assert ledger.execute("select what, n from total").fetchall() == [("all", 5)]


def test_a_function_that_uses_what_cannot_be_sent_is_refused(ledger, monkeypatch):
    """Takes seconds if Spark is not imported yet."""
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "local[1]"}))
    lock = threading.Lock()
    with DAG("ledgers"):

        @pgchange_spark_task(feed=FEED, postgres_conn_id="airline")
        def reads(job):
            lock.acquire()

        task = reads().operator
        with pytest.raises(InvalidArgument, match="reads cannot be sent to Spark"):
            task.execute({})


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (lambda batch: None, {}, "let it take the argument `job`"),
        (lambda job: None, {"application": "a.py"}, "the function is the application"),
    ],
)
def test_invalid_arguments_are_refused_when_the_dag_is_parsed(function, arguments, said):
    with DAG("ledgers"), pytest.raises(InvalidArgument, match=said):
        pgchange_spark_task(function, feed=FEED, **arguments)()


def test_arguments_are_checked_where_the_dag_is_read():
    with DAG("ledgers"), pytest.raises(TypeError, match="what"):
        pgchange_spark_task(lambda job, what: None, feed=FEED)()
