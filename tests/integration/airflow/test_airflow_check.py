"""``airflow-pgchange check`` on a real server: which feeds of DAGs can be watched, and advice for those that cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from airflow_pgchange.cli import check as command
from airflow_pgchange.cli import common
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.triggers.feed import FeedTrigger
from tests.airflow_home import uri
from tests.command_line import Command, parsed
from tests.conftest import Role
from tests.events import publish, subscribe
from tests.ledger import Connect
from tests.watching import first

DAG = """
from airflow.sdk import dag
from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.feeds import CommitFeed, EventFeed, TubeFeed
from airflow_pgchange.operators import BatchOperator, MaintenanceOperator, SparkBatchOperator

@dag(schedule=[{assets}])
def woken():
    {task}

woken()
"""
ODD_DAG = """
from airflow.sdk import DAG
from airflow.timetables.simple import NullTimetable

class Mine(NullTimetable):
    pass

odd = DAG("odd", schedule=Mine())
"""
GOOD = "feed_asset(CommitFeed('delays', 0), 'airline')"
Check = Callable[..., tuple[Any, int]]


def dag_file(folder: Path, *assets: str, task: str = "pass", name: str = "woken.py") -> Path:
    """Create a DAG that is scheduled by assets and has a task."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(DAG.format(assets=", ".join(assets), task=task))
    return file


@pytest.fixture
def check_files(capsys: pytest.CaptureFixture[str]) -> Check:
    """Check files. Return the rows of the command and its exit code."""

    def run(*files: Path | str) -> tuple[Any, int]:
        args = parsed("check", *map(str, files), "--output", "json")
        capsys.readouterr()
        code = 0
        try:
            args.func(args)
        except SystemExit as ended:
            code = int(str(ended.code))
        return json.loads(capsys.readouterr().out), code

    return run


@pytest.fixture
def check(tmp_path: Path, check_files: Check) -> Check:
    """Check a DAG that is scheduled by assets and has a task. Return the rows of the command and its exit code."""
    return lambda *assets, task="pass": check_files(dag_file(tmp_path, *assets, task=task))


def hindrance(check: Check, *assets: str) -> str:
    """Return the reason why one of the assets' feeds cannot be watched."""
    rows, code = check(*assets)
    (why,) = [row["hindrance"] for row in rows if row["can be watched"] == "no"]
    assert code == 1
    return str(why)


def test_a_feed_that_can_be_watched_ends_with_code_0(check: Check, conn_id: str) -> None:
    rows, code = check(GOOD)
    assert code == 0
    assert rows == [
        {
            "connection": "airline",
            "source": "",
            "consumer": "commits:delays/0",
            "dags": "woken",
            "new consumer": "starts at the beginning: 0 changes",
            "can be watched": "yes",
            "hindrance": "",
        }
    ]


@pytest.mark.parametrize(
    ("asset", "told"),
    [
        ("feed_asset(CommitFeed('delays', 999), 'airline')", "there is no branch 999"),
        ("feed_asset(TubeFeed('mistyped'), 'airline')", "there is no tube mistyped"),
        ("feed_asset(EventFeed('mistyped'), 'airline')", "there is no group 'mistyped'"),
        ("feed_asset(CommitFeed('other', 0), 'nowhere')", "`airflow connections add` makes one"),
    ],
)
def test_a_feed_that_cannot_be_watched_ends_with_code_1_and_the_reason(
    check: Check, conn_id: str, asset: str, told: str
) -> None:
    assert told in hindrance(check, GOOD, asset)


def test_where_our_schemas_are_not_it_says_how_they_come(
    check: Check, bare_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(bare_db))
    assert "airflow-pgchange install" in hindrance(check, GOOD)


def test_a_schema_of_another_version_is_told(check: Check, conn_id: str, connect: Connect) -> None:
    connect().execute("update pubsub.installed set version = 99")
    assert "schema pubsub is at version 99" in hindrance(check, GOOD)


SPARK_TASK = (
    "SparkBatchOperator("
    "task_id='{0}', feed=CommitFeed('delays', 0), postgres_conn_id='airline', application='a', {1})"
)
SPARK = {
    "spark_default": (
        "",
        None,
        "there is no connection spark_default; `airflow connections add spark_default",
    ),
    "away": ("conn_id='away'", "spark://127.0.0.1:1", "cannot reach the Spark master at 127.0.0.1:1"),
    "old": ("conn_id='old', spark_binary='spark3-submit'", "spark://local", "no program spark3-submit"),
    "java": ("conn_id='java', env_vars={'JAVA_HOME': '/x'}", "spark://local", "JAVA_HOME is /x"),
    "jars": (
        "conn_id='jars', jars='a.jar'",
        "spark-connect://h",
        "jars: the connection jars is a Spark Connect server",
    ),
    "good": ("conn_id='good', env_vars={'JAVA_HOME': '{{ ds }}'}", "spark://local", ""),
}
MAPPED = (
    "SparkBatchOperator.partial(task_id='mapped', postgres_conn_id='airline', application='a', conn_id='far')"
    ".expand(feed=[CommitFeed('delays', 0)])"
)


def test_spark_is_checked_as_its_operator_would_do_it_unless_it_is_not_wanted(
    check_files: Check, tmp_path: Path, conn_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {**{name: told for name, (_, _, told) in SPARK.items()}, "far": "there is no connection far"}
    for name, (_, connection, _) in SPARK.items():
        if connection is not None:
            monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", connection)
    tasks = [SPARK_TASK.format(name, arguments) for name, (arguments, _, _) in SPARK.items()]
    file = dag_file(tmp_path, task="\n    ".join([*tasks, MAPPED]))
    rows, code = check_files(file)
    found = {row["connection"]: row for row in rows if row["connection"] != "airline"}
    assert (code, found.keys()) == (1, told.keys())
    for name, row in found.items():
        assert (row["dags"], row["can be watched"]) == ("woken", "no" if told[name] else "yes"), row
        assert row["hindrance"].partition(told[name] or "?")[1] == told[name], row
    assert [row["connection"] for row in check_files(file, "--no-spark")[0]] == ["airline"]


@pytest.mark.usefixtures("metadata")
def test_a_spark_connection_of_airflows_own_database_is_found(
    check_files: Check, tmp_path: Path, conn_id: str
) -> None:
    from airflow.models import Connection
    from airflow.utils.session import create_session

    stored = Connection("stored", "spark", host="spark://127.0.0.1:1")
    with create_session() as session:
        session.add(stored)
    try:
        rows, _ = check_files(dag_file(tmp_path, task=SPARK_TASK.format("count", "conn_id='stored'")))
    finally:
        with create_session() as session:
            session.delete(stored)
    (why,) = [row["hindrance"] for row in rows if row["connection"] == "stored"]
    assert "cannot reach the Spark master at 127.0.0.1:1" in why


def test_rights_that_are_missing_are_told_with_the_grant_that_gives_them(
    check: Check, conn_id: str, role: Callable[[str], Role], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(role("watcher").conninfo))
    assert "pubsub.grant_consumer" in hindrance(check, GOOD)


def test_a_server_that_does_not_answer_is_told(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", "postgres://127.0.0.1:1/airline")
    assert "port 1" in hindrance(check, GOOD)


def test_a_connection_that_a_task_names_without_a_feed_is_looked_at_too(check: Check, conn_id: str) -> None:
    rows, code = check(task="MaintenanceOperator(task_id='keep', postgres_conn_id='nowhere')")
    assert (rows[0]["connection"], rows[0]["consumer"], code) == ("nowhere", "", 1)


def test_a_file_that_cannot_be_imported_is_told_with_the_others(
    check_files: Check, tmp_path: Path, conn_id: str
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("from airflow.sdk import dag, nonsense")
    rows, code = check_files(broken, dag_file(tmp_path, GOOD))
    assert [(row["consumer"], row["can be watched"]) for row in rows] == [
        ("commits:delays/0", "yes"),
        ("", "no"),
    ]
    assert "broken.py cannot be imported" in rows[1]["hindrance"]
    assert "nonsense" in rows[1]["hindrance"]
    assert code == 1


def test_a_file_may_import_its_neighbour(check_files: Check, tmp_path: Path, conn_id: str) -> None:
    (tmp_path / "neighbour_of_woken.py").write_text("THING = 1")
    file = dag_file(tmp_path, GOOD)
    file.write_text("from neighbour_of_woken import THING\n" + file.read_text())
    rows, code = check_files(file)
    assert ([row["consumer"] for row in rows], code) == (["commits:delays/0"], 0)


TWICE = "feed_asset(CommitFeed('delays', 0), 'airline', name='mine', {})"


def test_a_name_with_two_sets_of_conditions_is_told_with_both_and_the_dags_that_give_them(
    check_files: Check, tmp_path: Path, conn_id: str
) -> None:
    one = dag_file(tmp_path, TWICE.format("min_changes=2"))
    other = dag_file(tmp_path, TWICE.format("min_changes=1000, max_age='10 min'"), name="other.py")
    other.write_text(other.read_text().replace("woken", "seldom"))
    ((row,), code) = check_files(one, other)
    assert (row["consumer"], row["can be watched"], code) == ("commits:delays/0", "no", 1)
    assert "DAGs give asset 'mine' different watchers" in row["hindrance"]
    assert "min_changes=1000, max_age=600.0 by seldom" in row["hindrance"]
    assert "min_changes=2, max_age=None by woken; leave out its name" in row["hindrance"]


CLAIMING = (
    "BatchOperator(task_id='add', feed=CommitFeed('delays', 0{}), postgres_conn_id='airline', process=print)"
)


def test_two_starts_of_a_new_consumer_are_told_with_the_dags_that_give_them(
    check_files: Check, tmp_path: Path, conn_id: str, db: str
) -> None:
    """The starts in assets and sensors do not count, because these register no consumer. No start counts once the
    consumer exists."""
    one = dag_file(tmp_path, GOOD, task=CLAIMING.format(", start='now'"))
    other = dag_file(tmp_path, task=CLAIMING.format(""), name="other.py")
    other.write_text(other.read_text().replace("woken", "seldom"))
    ((row,), code) = check_files(one)
    assert (row["hindrance"], row["new consumer"], code) == ("", "starts at now", 0)
    ((row,), code) = check_files(one, other)
    assert "start='beginning' in seldom; start='now' in woken; give the feed the same" in row["hindrance"]
    assert code == 1
    with ConsumerTransaction(CommitFeed("delays", 0), db):
        pass
    ((row,), code) = check_files(one, other)
    assert (row["hindrance"], row["new consumer"], code) == ("", "", 0)


def test_an_asset_with_two_poll_intervals_is_told_to_have_one(
    check: Check, conn_id: str, tmp_path: Path
) -> None:
    inlet = "Maintained(task_id='keep', postgres_conn_id='airline', inlets=[{}])"
    asset = "feed_asset(CommitFeed('delays', 0), 'airline', poll_interval={})"
    task = inlet.format(asset.format(5)).replace("Maintained", "MaintenanceOperator")
    told = hindrance(lambda *assets: check(*assets, task=task), asset.format(1))
    assert "give it the same poll_interval everywhere" in told


def test_two_dags_on_a_feed_with_conditions_of_their_own_can_be_watched(check: Check, conn_id: str) -> None:
    conditional = "feed_asset(CommitFeed('delays', 0), 'airline', min_changes=1000, max_age='10 min')"
    ((row,), code) = check(GOOD, conditional)
    assert (row["can be watched"], code) == ("yes", 0)


def test_of_files_with_a_dag_of_the_same_name_each_is_looked_at(
    check_files: Check, tmp_path: Path, conn_id: str
) -> None:
    other = "feed_asset(CommitFeed('other', 0), 'airline')"
    rows, _ = check_files(
        dag_file(tmp_path / "one", GOOD), dag_file(tmp_path / "two", other, name="again.py")
    )
    assert [row["consumer"] for row in rows] == ["commits:delays/0", "commits:other/0"]


def test_a_dag_that_cannot_be_serialized_is_told_with_the_others(
    check_files: Check, tmp_path: Path, conn_id: str
) -> None:
    file = tmp_path / "odd.py"
    file.write_text(ODD_DAG)
    rows, code = check_files(file, dag_file(tmp_path, GOOD))
    told = {row["dags"]: row["hindrance"] for row in rows}
    assert told["woken"] == ""
    assert "odd cannot be serialized" in told["odd"]
    assert code == 1


def test_a_look_at_an_event_group_dispatches_nothing(check: Check, conn_id: str, connect: Connect) -> None:
    people = connect()
    subscribe(people)
    publish(people, "made")
    rows, code = check("feed_asset(EventFeed('g'), 'airline')")
    assert ([row["hindrance"] for row in rows], code) == ([""], 0)
    assert people.execute("select count(*) from pgmb.dispatched").fetchone() == (0,)


def test_an_error_about_a_server_shows_no_password(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", "postgres://me:127.0.0.1@127.0.0.1:1/airline")
    why = hindrance(check, GOOD)
    assert "port 1" in why
    assert "127.0.0.1" not in why


def test_an_error_about_a_feed_shows_no_password(
    check: Check, conn_id: str, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db).replace("@", ":mistyped@", 1))
    why = hindrance(check, "feed_asset(TubeFeed('mistyped'), 'airline')")
    assert "there is no tube ***" in why


async def test_status_says_which_feed_a_watcher_cannot_look_at(
    conn_id: str, db: str, pgchange: Command, capsys: pytest.CaptureFixture[str], connect: Connect
) -> None:
    await first(FeedTrigger({"kind": "commit", "consumer": "delays", "branch": 999}, conn_id, once=True))
    assert connect().execute("select feed from pgchange.watchers() where error is not null").fetchall()
    args = parsed("status", "--dsn", db)
    args.func(args)
    told = capsys.readouterr().err
    assert "commits:delays/999: it cannot be watched" in told
    assert "there is no branch 999" in told


def test_an_airflow_whose_database_was_never_migrated_is_told_apart_from_one_without_dags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = create_engine("sqlite://")
    monkeypatch.setattr(common, "create_session", lambda: closing(Session(engine)))
    with pytest.raises(SystemExit) as ended:
        command.check(parsed("check"))
    assert re.fullmatch(
        r"InvalidArgument: Airflow's own database .*no such table.*; run airflow db migrate, or .*",
        str(ended.value),
    )
