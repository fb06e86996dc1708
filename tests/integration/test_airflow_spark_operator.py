"""The Spark operator around its job: what it hands over, and how the job ends. A script stands in for spark-submit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.sdk.exceptions import AirflowException
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.feeds.errors import ConnectionLost, InvalidArgument, PgChangeError, Stopped
from airflow_pgchange.operators.spark import SparkBatchOperator
from tests.waiting import locks, until

Connect = Callable[..., psycopg.Connection[Any]]
FEED = CommitFeed("delays", 0)
PASSWORD = "hunter2-of-the-airline"

SUBMIT = f"""#!{sys.executable}
import os, subprocess, sys
open(os.environ["SEEN"], "w").write(repr((sys.argv, {{k: v for k, v in os.environ.items() if "AIRFLOW" not in k}})))
application = next(argument for argument in sys.argv if argument.endswith("application.py"))
sys.exit(subprocess.run([sys.executable, application]).returncode)
"""

WELL = """
from airflow_pgchange.feeds.merge import write_manifest
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


@pytest.fixture
def conn_id(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> str:
    connect().execute(
        "create table ledger (id bigint generated always as identity primary key);"
        "select revision.track('ledger', branch_id => '0');"
        "insert into ledger select from generate_series(1, 5)"
    )
    server = conninfo_to_dict(db)
    uri = f"postgres://postgres:{PASSWORD}@{server['host']}:{server['port']}/{server['dbname']}"
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", f"{uri}?application_name=airline")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", "spark://local%5B1%5D")
    return "airline"


@pytest.fixture
def operator(
    conn_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SparkBatchOperator]:
    """An operator whose application is the given text."""
    submit, application = tmp_path / "spark-submit", tmp_path / "application.py"
    submit.write_text(SUBMIT)
    submit.chmod(0o755)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("PID", str(tmp_path / "pid"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))

    def make(text: str, **arguments: Any) -> SparkBatchOperator:
        application.write_text(text)
        given = {"feed": FEED, "postgres_conn_id": conn_id, "spark_binary": str(submit), **arguments}
        return SparkBatchOperator(task_id="aggregate", application=str(application), **given)

    return make


def run(task: SparkBatchOperator) -> dict[str, Any]:
    return task.execute({})  # type: ignore[typeddict-item]


def in_background(task: SparkBatchOperator) -> threading.Thread:
    """Run a task that is going to be killed."""

    def target() -> None:
        with pytest.raises(Stopped):
            run(task)

    thread = threading.Thread(target=target)
    thread.start()
    return thread


def job_of(folder: Path) -> int:
    """The process of the job, once it runs: where Airflow is to be imported first, that takes a while."""
    deadline = time.monotonic() + 120
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.02)
    return int((folder / "pid").read_text())


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline, "the job lives on"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def attempts(connect: Connect) -> list[tuple[Any, ...]]:
    return connect().execute("select attempt from pgchange.claim").fetchall()


def test_a_job_that_ends_well_advances_the_consumer(operator: Callable[..., SparkBatchOperator]) -> None:
    assert run(operator(WELL))["changes"] == 5
    assert run(operator(WELL))["changes"] == 0


def test_a_drain_submits_a_job_for_each_batch(operator: Callable[..., SparkBatchOperator]) -> None:
    assert run(operator(WELL, limit=2, max_batches=None))["batches"] == 3


def test_a_job_that_ends_well_without_having_opened_the_batch_fails_the_task(
    operator: Callable[..., SparkBatchOperator],
) -> None:
    with pytest.raises(PgChangeError, match="batch_job"):
        run(operator("pass"))
    assert run(operator(WELL))["changes"] == 5


def test_a_job_that_fails_is_tried_again_with_the_same_batch(
    operator: Callable[..., SparkBatchOperator], connect: Connect
) -> None:
    with pytest.raises(AirflowException, match="Error code is: 1"):
        run(operator("raise SystemExit(1)"))
    assert run(operator(WELL))["changes"] == 5
    assert attempts(connect) == [(2,)]


def test_no_password_is_on_the_command_line_in_the_environment_or_in_the_log(
    operator: Callable[..., SparkBatchOperator], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(operator(WELL))
    assert "application.py" in (tmp_path / "seen").read_text()
    assert PASSWORD not in (tmp_path / "seen").read_text()
    assert PASSWORD not in "".join(capfd.readouterr())


def test_nothing_of_a_submission_is_left_behind(
    operator: Callable[..., SparkBatchOperator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with pytest.raises(AirflowException):
        run(operator("raise SystemExit(1)"))
    assert list(scratch.iterdir()) == []


def test_the_users_own_environment_reaches_the_job(
    operator: Callable[..., SparkBatchOperator], tmp_path: Path
) -> None:
    run(operator(WELL, env_vars={"COLOUR": "blue"}))
    assert "'COLOUR': 'blue'" in (tmp_path / "seen").read_text()


@pytest.mark.parametrize(
    ("given", "user"), [({}, "airline"), ({"instances_conn_id": "instances"}, "instances")], ids=["", "named"]
)
def test_the_job_gets_the_catalogue_and_how_to_reach_instances(
    operator: Callable[..., SparkBatchOperator],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    user: str,
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_CATALOGUE", "postgres://postgres@host/catalogue")
    monkeypatch.setenv("AIRFLOW_CONN_INSTANCES", "postgres://postgres@/?application_name=instances")
    said = f"assert 'catalogue' in request.cluster.catalogue and '{user}' in request.cluster.instances"
    assert run(operator(WELL + said, catalogue_conn_id="catalogue", **given))["changes"] == 5


def test_our_package_goes_along_with_the_users_files(
    operator: Callable[..., SparkBatchOperator], tmp_path: Path
) -> None:
    run(operator(WELL, py_files="mine.zip", limit=2, max_batches=None))
    (given,) = [part for part in (tmp_path / "seen").read_text().split("'") if part.startswith("mine.zip,")]
    assert given.count(",") == 1


@pytest.mark.parametrize(
    "arguments", [{"deploy_mode": "cluster"}, {"conf": {"spark.submit.deployMode": "cluster"}}]
)
def test_cluster_mode_is_refused_by_name(
    operator: Callable[..., SparkBatchOperator], arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match="cluster"):
        run(operator(WELL, **arguments))


def test_a_job_that_would_outlive_the_try_is_refused(operator: Callable[..., SparkBatchOperator]) -> None:
    with pytest.raises(InvalidArgument, match="durable"):
        operator(WELL, durable=True)


def test_the_transaction_holds_nothing_while_the_job_runs(
    operator: Callable[..., SparkBatchOperator], connect: Connect, tmp_path: Path
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


def test_a_task_that_is_killed_after_its_job_has_ended_kills_nobody(
    operator: Callable[..., SparkBatchOperator], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    task = operator(WELL)
    run(task)
    task.on_kill()
    assert killed == []


def test_a_killed_task_ends_its_job_and_what_the_job_started(
    operator: Callable[..., SparkBatchOperator], tmp_path: Path
) -> None:
    task = operator(FOREVER)
    thread = in_background(task)
    job = job_of(tmp_path)
    task.on_kill()
    thread.join()
    wait_for_end(job)


def test_what_a_killed_job_kept_for_its_own_time_goes_too(
    operator: Callable[..., SparkBatchOperator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_killed_task_says_so_and_keeps_nothing(
    operator: Callable[..., SparkBatchOperator], tmp_path: Path
) -> None:
    task = operator(FOREVER)
    killer = threading.Thread(target=lambda: (job_of(tmp_path), task.on_kill()))
    killer.start()
    with pytest.raises(Stopped, match="killed"):
        run(task)
    killer.join()
    assert run(operator(WELL))["changes"] == 5


def test_a_task_killed_while_it_merges_keeps_nothing(
    operator: Callable[..., SparkBatchOperator], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = operator(WELL)
    with monkeypatch.context() as patched:
        patched.setattr("airflow_pgchange.operators.spark.merge", lambda *_: task.on_kill())
        with pytest.raises(Stopped, match="killed"):
            run(task)
    assert run(operator(WELL))["changes"] == 5


def test_what_openlineage_injects_reaches_spark(
    operator: Callable[..., SparkBatchOperator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "airflow.providers.apache.spark.operators.spark_submit.inject_parent_job_information_into_spark_properties",
        lambda conf, context: {**conf, "spark.openlineage.parentJobName": "delays"},
    )
    run(operator(WELL, openlineage_inject_parent_job_info=True))
    assert "spark.openlineage.parentJobName=delays" in (tmp_path / "seen").read_text()


def test_a_lost_connection_ends_the_job(
    operator: Callable[..., SparkBatchOperator], connect: Connect, tmp_path: Path
) -> None:
    task = operator(FOREVER)
    task.ping_every = 0.1

    def cut() -> None:
        job_of(tmp_path)
        # Between two of its pings, which are short.
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
    operator: Callable[..., SparkBatchOperator], connect: Connect, tmp_path: Path
) -> None:
    """Seconds: a JVM has to be at work before its operator is killed."""
    follow = "from airflow_pgchange.spark.parent import follow_parent; follow_parent(0.05)\n"
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
