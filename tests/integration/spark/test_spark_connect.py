"""A batch beside a Spark Connect server: the same results as by spark-submit, and its log lines."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from unittest.mock import patch

import pytest

from airflow_pgchange.errors import (
    ApplicationFailed,
    InvalidArgument,
    MergeRefused,
    PermissionDenied,
    ServerUnavailable,
    VersionsDiffer,
)
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators import spark_checks, spark_connect
from airflow_pgchange.spark import session
from tests.connect_operator import ADD_UP, LEDGER, airline, make_operator, run
from tests.every_type import differences, fill, make_tables
from tests.hard_names import HARD


@pytest.fixture
def ledger(db, connect, monkeypatch):
    """A ledger of five changes."""
    connection = connect()
    connection.execute(LEDGER)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", airline(db))
    return connection


@pytest.fixture
def operator(connect_server, ledger, tmp_path):
    """A function that makes an operator of an application's text."""
    return lambda text, **arguments: make_operator(tmp_path, text, **arguments)


def total(connection):
    return connection.execute("select n from total").fetchone()


def test_temporary_files_of_a_server_are_in_its_folder(connect_server, operator):
    told = """
from airflow_pgchange.spark.entry_point import batch_job
with batch_job() as job:
    (row,) = job.spark.sql("select java_method('java.lang.System', 'getProperty', 'java.io.tmpdir') as folder").collect()
    assert row.folder == {folder!r}, row.folder
"""
    run(operator(told.format(folder=connect_server.folder)))


COPY = """
from airflow_pgchange.spark import batch_job, job as jobs, session
jobs.SMALL = {small}
with batch_job() as job:
    assert job.spark.conf.get("spark.sql.session.timeZone") == "America/New_York"
    assert session.parallelism(job.spark) == 2
    rows = job.rows("public.typed", key="id").dropDuplicates(["id"])
    job.merge(rows, into="public.copied", key="id", mode="replace")
    assert [attempt >= 0 for attempt, _ in job.staged[0].winners] == [{executors}] * len(job.staged[0].winners)
"""


@pytest.mark.parametrize(("small", "executors"), [(1_000_000, False), (0, True)], ids=["driver", "executors"])
def test_every_type_under_every_name_comes_back_as_it_was(
    connect_server, db, connect, monkeypatch, tmp_path, small, executors
):
    """Takes seconds: the server's Python processes start."""
    connection = connect()
    known = make_tables(connection, HARD)
    branch = connection.execute("select revision.track('public.typed')").fetchone()[0]
    fill(connection, known)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", airline(db))
    task = make_operator(
        tmp_path,
        COPY.format(small=small, executors=executors),
        feed=CommitFeed("copies", branch),
        conf={"spark.sql.session.timeZone": "America/New_York"},
    )
    assert run(task)["batches"] == 1
    assert connection.execute("select count(*) from copied").fetchone() == (6,)
    assert differences(connection, known) == []


def test_the_same_application_adds_batch_after_batch_and_what_each_is_at_is_said(
    operator, ledger, monkeypatch
):
    """Takes seconds: an application for each of three batches."""
    monkeypatch.setattr("airflow_pgchange.feeds.attempt_phases.EVERY", 0.01)
    task = operator(ADD_UP, limit=2, max_batches=None)
    with patch.object(task.log, "info") as info:
        assert run(task)["batches"] == 3
    assert total(ledger) == (5,)
    said = "\n".join(str(call.args[-1]) for call in info.call_args_list)
    for told in ("reading: 2 changes", "staged public.total: 1 rows", "merging public.total: 1 rows"):
        assert told in said


SERVE = """
import os
from pyspark.sql import functions as f
from airflow_pgchange.spark import batch_jobs, job as jobs
jobs.SMALL = {small}
for job in batch_jobs():
    print(os.getpid(), "serves", job.spark.session_id)
    rows = job.rows("public.ledger", key="id").groupBy(f.lit("all").alias("what"))
    job.merge(rows.agg(f.sum("amount").alias("n")), into="public.total", key="what", mode="add")
"""


@pytest.mark.parametrize("small", [1_000_000, 0], ids=["driver", "executors"])
def test_an_application_that_serves_batches_does_so_in_one_process_and_one_session(
    operator, ledger, connect_server, small
):
    """Takes seconds: the server's Python processes start."""
    task = operator(SERVE.format(small=small), limit=2, max_batches=None)
    with patch.object(task.log, "info") as info:
        assert run(task)["batches"] == 3
    said = [call.args[0] for call in info.call_args_list if "serves" in call.args[0]]
    assert (len(said), len(set(said))) == (3, 1)
    assert total(ledger) == (5,)
    connect_server.wait_until_idle()


LEFT = """
from airflow_pgchange.spark.entry_point import batch_jobs
for job in batch_jobs():
    break
"""


def test_a_batch_whose_loop_is_left_by_a_break_is_not_processed(operator, ledger):
    with pytest.raises(MergeRefused, match="must not be left by a break"):
        run(operator(LEFT))
    assert run(operator(ADD_UP))["changes"] == 5


WAIT = """
from airflow_pgchange.spark.entry_point import batch_job
with batch_job() as job:
    job.spark.sql("select java_method('java.lang.Thread', 'sleep', 500L) from range(1)").collect()
"""


def test_while_spark_runs_it_is_said_how_many_of_its_stages_are_done(operator, monkeypatch):
    """A server reports progress every two seconds, and may report nothing about shorter queries."""
    monkeypatch.setattr("airflow_pgchange.feeds.attempt_phases.EVERY", 0.01)
    task = operator(WAIT, conf={"spark.connect.progress.reportInterval": "50ms"})
    with patch.object(task.log, "info") as info:
        assert run(task)["batches"] == 1
    assert any(re.search(r"stages: \d+ of \d+ done", str(call.args[-1])) for call in info.call_args_list)


TOLD = """
import os, sys
import mine, other
print(sys.argv[1:], os.environ["COLOUR"], mine.WORD, other.WORD)
from airflow_pgchange.spark.entry_point import batch_job
with batch_job() as job:
    @__import__("pyspark.sql.functions", fromlist=["udf"]).udf
    def word(_):
        import airflow_pgchange, mine
        return mine.WORD
    print(job.spark.range(1).select(word("id")).collect()[0][0], "on the server")
"""


def test_arguments_variables_and_files_reach_the_application_and_its_output_the_log(operator, tmp_path):
    """Takes seconds: the server's Python processes start."""
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr("mine.py", "WORD = 'zipped'")
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "other.py"
    other.write_text("WORD = 'plain'")
    task = operator(
        TOLD,
        application_args=["a", 1],
        env_vars={"COLOUR": "blue"},
        py_files=f"{tmp_path / 'mine.zip'},{other}",
    )
    with patch.object(task.log, "info") as info:
        assert run(task)["changes"] == 5
    said = [call.args[0] for call in info.call_args_list]
    assert {"['a', '1'] blue zipped plain", "zipped on the server"} <= set(said)


def test_an_application_that_fails_keeps_nothing_and_is_tried_again_with_its_batch(
    operator, ledger, connect_server
):
    """Takes seconds: two applications."""
    with pytest.raises(ApplicationFailed, match="code 1: RuntimeError: on purpose"):
        run(operator(ADD_UP + "    raise RuntimeError('on purpose')"))
    assert total(ledger) is None
    assert run(operator(ADD_UP))["changes"] == 5
    assert total(ledger) == (5,)
    assert ledger.execute("select attempt from pgchange.claim").fetchall() == [(2,)]
    connect_server.wait_until_idle()


def test_an_error_of_many_lines_is_reported_by_the_line_that_names_the_cause(operator):
    unknown = ADD_UP + '    job.spark.sql("select nothing").collect()'
    with pytest.raises(
        ApplicationFailed, match=r"code 1: pyspark.*AnalysisException: \[UNRESOLVED_COLUMN.*nothing"
    ):
        run(operator(unknown))


def test_a_setting_of_the_server_is_refused_by_name(operator):
    with pytest.raises(ApplicationFailed, match="spark.executor.memory cannot be set for a session"):
        run(operator(ADD_UP, conf={"spark.executor.memory": "1g"}))


def test_a_server_of_another_version_is_refused(operator):
    older = "import pyspark.version; pyspark.version.__version__ = '3.5.1'\n"
    with pytest.raises(ApplicationFailed, match="server has version 4.* and pyspark here 3.5.1"):
        run(operator(older + ADD_UP))


def test_a_server_of_another_version_is_refused_before_a_claim(operator, ledger, tmp_path, monkeypatch):
    older = tmp_path / "check.py"
    older.write_text(
        "import pyspark.version; pyspark.version.__version__ = '3.5.1'\n"
        + Path(spark_connect.VERSION_CHECK).read_text()
    )
    monkeypatch.setattr(spark_connect, "VERSION_CHECK", str(older))
    with pytest.raises(VersionsDiffer, match=r"^the Spark Connect server has version 4.* here 3\.5\.1"):
        run(operator(ADD_UP))
    assert ledger.execute("select from pgchange.claim").fetchall() == []
    with pytest.raises(VersionsDiffer):
        spark_checks.check_spark("spark_default", None, [], os.environ)


def test_a_token_that_the_server_refuses_is_said_before_a_claim(connect_server, monkeypatch):
    wrong = {**connect_server.connection, "password": "wrong"}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(wrong))
    with pytest.raises(PermissionDenied, match=r"^the Spark Connect server refused the token .* password"):
        spark_checks.check_spark("spark_default", None, [], os.environ)


@pytest.mark.parametrize("given", [{"jars": "a.jar"}, {"executor_memory": "2g"}, {"properties_file": "p"}])
def test_an_argument_that_only_a_driver_can_use_is_refused_by_name(ledger, tmp_path, monkeypatch, given):
    monkeypatch.setenv(
        "AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark_connect", "host": "sc://h"})
    )
    with pytest.raises(
        InvalidArgument, match=f"{next(iter(given))}: the connection spark_default is a Spark Connect"
    ):
        run(make_operator(tmp_path, ADD_UP, **given))


def test_a_server_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(session, "PATIENCE", 0.2)
    with pytest.raises(
        ServerUnavailable, match="no Spark Connect server answered at 127.0.0.1:1 in 0.2 s: start it"
    ):
        session._reach("sc://127.0.0.1:1/")
