"""The Spark operator around its job: the request to the application, and the log lines. A script stands in for
spark-submit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from airflow.providers.common.compat.sdk import AirflowException
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_pgchange.assets.targets import table_asset, target_tables
from airflow_pgchange.errors import InvalidArgument, PgChangeError
from tests.connect_operator import PASSWORD, run
from tests.submit_operator import (
    FOREVER,
    WELL,
    Connect,
    MakeOperator,
    attempts,
    in_background,
    job_of,
)
from tests.suite.servers import one_of
from tests.waiting import locks

STAGES = """
import psycopg
from airflow_pgchange.results.merge import write_manifest
from airflow_pgchange.spark.request import take
from tests.staging import stage
request = take()
columns = {"k": "integer", "n": "bigint"}
with psycopg.connect(request.results, autocommit=True) as connection:
    staged = stage(connection, "public.by_key", ["k"], "replace", columns, [(1, 5)], batch=request.batch)
write_manifest(request.manifest, [staged])
"""


def test_a_job_that_ends_well_advances_the_consumer(operator: MakeOperator) -> None:
    assert run(operator(WELL))["changes"] == 5
    assert run(operator(WELL))["changes"] == 0


NOTING = """
import time
long_ago = time.monotonic() - 1000
time.monotonic = lambda: long_ago
from airflow_pgchange.results.merge import write_manifest
from airflow_pgchange.spark.progress_notes import Notes
from airflow_pgchange.spark.request import take
request = take()
notes = Notes(request.manifest)
notes.add("reading", "5 changes")
notes.add("staged public.total", "1 rows")
write_manifest(request.manifest, [])
"""


def test_the_step_of_a_batch_and_the_durations_of_its_phases_are_logged(
    operator: MakeOperator, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_pgchange.feeds.attempt_phases.EVERY", 0.01)
    task = operator(NOTING)
    with patch.object(task.log, "info") as info:
        run(task)
    said = [call.args[0] % call.args[1:] for call in info.call_args_list]
    assert any(line.startswith("commits:delays/0: Spark") and "reading: 5 changes" in line for line in said)
    assert any(
        line.startswith("commits:delays/0: Spark") and "staged public.total: 1 rows" in line for line in said
    )
    phases = r"claim \S+, start \S+, process 1\d\d\d\.\d\d, merge \S+, ack \S+"
    assert re.search(r"committed after [\d.]+ s: " + phases, said[-2])
    kept = connect().execute("select seconds from pgchange.batches()").fetchall()
    assert [set(seconds) for (seconds,) in kept] == [{"claim", "start", "process", "merge"}]


def test_a_job_that_ends_well_without_having_opened_the_batch_fails_the_task(
    operator: MakeOperator,
) -> None:
    with pytest.raises(PgChangeError, match="batch_job"):
        run(operator("pass"))
    assert run(operator(WELL))["changes"] == 5


def test_a_job_that_fails_is_tried_again_with_the_same_batch(
    operator: MakeOperator, connect: Connect
) -> None:
    with pytest.raises(AirflowException, match="Error code is: 1"):
        run(operator("raise SystemExit(1)"))
    assert run(operator(WELL))["changes"] == 5
    assert attempts(connect) == [(2,)]


def test_no_password_is_on_the_command_line_in_the_environment_or_in_the_log(
    operator: MakeOperator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(operator(WELL))
    assert "application.py" in (tmp_path / "seen").read_text()
    assert PASSWORD not in (tmp_path / "seen").read_text()
    assert PASSWORD not in "".join(capfd.readouterr())


def test_nothing_of_a_submission_is_left_behind(
    operator: MakeOperator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with pytest.raises(AirflowException):
        run(operator("raise SystemExit(1)"))
    assert list(scratch.iterdir()) == []


def test_the_users_own_environment_reaches_the_job(operator: MakeOperator, tmp_path: Path) -> None:
    run(operator(WELL, env_vars={"COLOUR": "blue"}))
    assert "'COLOUR': 'blue'" in (tmp_path / "seen").read_text()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let the job find instances through the connection of the results, or through a separate connection."""
    if "instances" in metafunc.fixturenames:
        metafunc.parametrize("instances", one_of(["airline", "instances"], metafunc))


def test_the_job_gets_the_catalogue_and_how_to_reach_instances(
    operator: MakeOperator, monkeypatch: pytest.MonkeyPatch, instances: str
) -> None:
    given = {"instances_conn_id": "instances"} if instances == "instances" else {}
    monkeypatch.setenv("AIRFLOW_CONN_CATALOGUE", "postgres://postgres@host/catalogue")
    monkeypatch.setenv("AIRFLOW_CONN_INSTANCES", "postgres://postgres@/?application_name=instances")
    said = f"assert 'catalogue' in request.cluster.catalogue and '{instances}' in request.cluster.instances"
    assert run(operator(WELL + said, catalogue_conn_id="catalogue", **given))["changes"] == 5


def test_a_drain_submits_a_job_for_each_batch_with_our_package_beside_the_users_files_once(
    operator: MakeOperator, tmp_path: Path
) -> None:
    assert run(operator(WELL, py_files="mine.zip", limit=3, max_batches=None))["batches"] == 2
    (given,) = [part for part in (tmp_path / "seen").read_text().split("'") if part.startswith("mine.zip,")]
    assert given.count(",") == 1


@pytest.mark.parametrize(
    "arguments", [{"deploy_mode": "cluster"}, {"conf": {"spark.submit.deployMode": "cluster"}}]
)
def test_cluster_mode_is_refused_by_name(operator: MakeOperator, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="cluster"):
        run(operator(WELL, **arguments))


def test_a_job_that_would_outlive_the_try_is_refused(operator: MakeOperator) -> None:
    with pytest.raises(InvalidArgument, match="durable"):
        operator(WELL, durable=True)
    assert not operator(WELL).durable


def test_the_transaction_holds_nothing_while_the_job_runs(
    operator: MakeOperator, connect: Connect, tmp_path: Path
) -> None:
    task = operator(FOREVER)
    thread = in_background(task)
    job_of(tmp_path)
    working = connect().execute(
        "select count(*) filter (where backend_xid is not null or backend_xmin is not null), "
        "count(*) filter (where state = 'idle in transaction') "
        "from pg_stat_activity where application_name = 'airline' and datname = current_database()"
    )
    found = working.fetchone(), {lock.kind for lock in locks(connect(), application="airline")}
    task.on_kill()
    thread.join()
    assert found == ((0, 1), {"advisory", "virtualxid"})


def test_properties_that_openlineage_injects_reach_spark(
    operator: MakeOperator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "airflow_pgchange.operators.spark_arguments.inject_parent_job_information_into_spark_properties",
        lambda conf, context: {**conf, "spark.openlineage.parentJobName": "delays"},
    )
    run(operator(WELL, openlineage_inject_parent_job_info=True))
    assert "spark.openlineage.parentJobName=delays" in (tmp_path / "seen").read_text()


def test_a_table_into_which_a_batch_is_merged_is_a_target(
    operator: MakeOperator, connect: Connect, db: str
) -> None:
    connect().execute("create table by_key (k integer primary key, n bigint)")
    outlet, events = target_tables("totals"), OutletEventAccessors()
    operator(STAGES, outlets=[outlet]).execute({"outlet_events": events})  # type: ignore[typeddict-item]
    (event,) = events[outlet].asset_alias_events
    assert event.dest_asset_key.uri == table_asset(db, connect().info.dbname, "public", "by_key").uri
    assert event.extra["changes"] == 5
    assert connect().execute("select * from by_key").fetchall() == [(1, 5)]
