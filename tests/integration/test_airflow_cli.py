"""``airflow pgchange`` on a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.cli.cli_parser import get_parser
from psycopg.conninfo import make_conninfo

from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
)
from airflow_pgchange.schema import SYSTEMS
from airflow_pgchange.topology import TopologyClient
from demo.postgres import free_port
from tests.airflow_home import uri
from tests.conftest import Role
from tests.events import publish, subscribe
from tests.topology import make_catalogue
from tests.tubes import attach, make

Connect = Callable[..., psycopg.Connection[Any]]
Command = Callable[..., Any]
FEED = CommitFeed("delays", 0)


@pytest.fixture
def pgchange(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command and return what it prints, read as JSON."""

    def run(*arguments: str) -> Any:
        args = get_parser().parse_args(["pgchange", *arguments, "--output", "json"])
        capsys.readouterr()
        args.func(args)
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def ledger(db: str, connect: Connect) -> str:
    """A database with three commits, one of which a consumer claimed and could not finish."""
    connect().execute(
        "create table ledger (id bigint generated always as identity primary key);"
        "select revision.track('ledger', branch_id => '0');"
        "insert into ledger select from generate_series(1, 3)"
    )
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(1)
        raise ZeroDivisionError
    return db


def failed(caught: pytest.ExceptionInfo[SystemExit]) -> str:
    return str(caught.value.code)


@pytest.mark.hstore
def test_install_says_what_the_database_now_holds(bare_db: str, pgchange: Command) -> None:
    found = pgchange("install", "--dsn", bare_db)
    assert {row["system"] for row in found} == {system.folder for system in SYSTEMS}
    assert pgchange("install", "--dsn", bare_db) == found


def test_one_system_can_be_installed_alone(bare_db: str, pgchange: Command) -> None:
    assert [row["system"] for row in pgchange("install", "--dsn", bare_db, "--system", "revision")] == [
        "revision"
    ]


def test_upgrade_of_what_is_up_to_date_changes_nothing(db: str, pgchange: Command) -> None:
    assert all(row["version"] == row["needed"] for row in pgchange("upgrade", "--dsn", db))


def test_uninstall_removes_the_schemas(db: str, pgchange: Command) -> None:
    assert len(pgchange("uninstall", "--dsn", db, "--yes")) == len(SYSTEMS)


def test_what_destroys_something_asks_first(ledger: str, pgchange: Command) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange("uninstall", "--dsn", ledger)
    assert "--yes" in failed(caught)


def test_status_tells_how_far_behind_a_consumer_is_and_on_what_it_works(
    ledger: str, pgchange: Command
) -> None:
    (found,) = pgchange("status", "--dsn", ledger)
    assert (found["consumer"], found["ready"], found["attempt"]) == ("delays/0", 3, 1)


def test_status_shows_what_a_role_may_see_and_says_what_it_leaves_out(
    ledger: str, pgchange: Command, role: Callable[[str], Role], capsys: pytest.CaptureFixture[str]
) -> None:
    someone = role("someone")
    with pytest.raises(SystemExit) as caught:
        pgchange("status", "--dsn", someone.conninfo)
    assert "permission denied" in failed(caught)
    with psycopg.connect(ledger, autocommit=True) as owner:
        owner.execute(f"select pubsub.grant_consumer('{someone.name}')")
    args = get_parser().parse_args(["pgchange", "status", "--dsn", someone.conninfo])
    args.func(args)
    said = capsys.readouterr()
    assert "delays/0" in said.out
    assert "consumers such as events:mails are left out: permission denied" in said.err


def test_status_in_a_table_is_for_people(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = get_parser().parse_args(["pgchange", "status", "--dsn", ledger])
    args.func(args)
    assert "attempt 1" in capsys.readouterr().out


def test_an_airflow_connection_names_the_database_too(
    ledger: str, pgchange: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(ledger))
    assert len(pgchange("status", "--conn-id", "airline")) == 1


def test_skip_gives_up_the_batch_in_work(ledger: str, pgchange: Command) -> None:
    (found,) = pgchange("skip", "delays/0", "--dsn", ledger, "--reason", "a poisonous row")
    assert found["skipped"]
    (status,) = pgchange("status", "--dsn", ledger)
    assert status["ready"] == 2


def test_skip_without_a_batch_in_work_says_so(ledger: str, pgchange: Command) -> None:
    pgchange("skip", "delays/0", "--dsn", ledger, "--reason", "a poisonous row")
    with pytest.raises(SystemExit) as caught:
        pgchange("skip", "delays/0", "--dsn", ledger, "--reason", "again")
    assert "no batch in work" in failed(caught)


@pytest.mark.parametrize(("to", "ready"), [("now", 0), ("beginning", 3), ("2001-01-01T00:00:00+00:00", 3)])
def test_move_takes_a_consumer_elsewhere(ledger: str, pgchange: Command, to: str, ready: int) -> None:
    pgchange("move", "delays/0", "--dsn", ledger, "--to", to, "--yes")
    (status,) = pgchange("status", "--dsn", ledger)
    assert status["ready"] == ready


def test_repair_tells_the_guarantee_from_here_on(ledger: str, pgchange: Command) -> None:
    (found,) = pgchange("repair", "delays/0", "--dsn", ledger, "--yes")
    assert found["from_here_on"] == "exactly once"


def test_drop_forgets_a_consumer(ledger: str, pgchange: Command) -> None:
    pgchange("drop", "delays/0", "--dsn", ledger, "--yes")
    assert pgchange("status", "--dsn", ledger) == []


def test_trim_says_what_it_did(ledger: str, pgchange: Command) -> None:
    assert isinstance(pgchange("trim", "--dsn", ledger, "--keep", "1 day", "--yes"), list)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["status"], "--conn-id or --dsn"),
        (["status", "--conn-id", "nowhere"], "airflow connections add"),
        (["status", "--dsn", "nonsense"], "host=... dbname=..."),
        (["status", "--dsn", "colour=blue"], "host=... dbname=..."),
        (["status", "--dsn", "host=127.0.0.1 port=1"], "try again"),
        (["skip", "delays", "--dsn", "dbname=x", "--reason", "y"], "delays/0"),
        (["move", "delays/0", "--dsn", "dbname=x", "--to", "tomorrow", "--yes"], "neither"),
        (["move", "tube:copies/0", "--dsn", "dbname=x", "--to", "now", "--yes"], "no watermark"),
        (["repair", "tube:copies/0", "--dsn", "dbname=x", "--yes"], "pgchange skip"),
        (["drop", "tube:copies/0", "--dsn", "dbname=x", "--yes"], "tube.tube_ensure_absent"),
        (["drop", "queue:orders/default", "--dsn", "dbname=x", "--yes"], "mbus.drop_consumer"),
        (["skip", "queue:orders", "--dsn", "dbname=x", "--reason", "y"], "queue:orders/default"),
        (["skip", "events:", "--dsn", "dbname=x", "--reason", "y"], "events:mails"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(pgchange: Command, arguments: list[str], advice: str) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange(*arguments)
    assert advice in failed(caught)


def test_a_database_without_our_schemas_is_told_what_to_run(bare_db: str, pgchange: Command) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange("status", "--dsn", bare_db)
    assert "airflow pgchange install" in failed(caught)


def test_an_unknown_consumer_is_told_where_the_names_are(db: str, pgchange: Command) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange("skip", "nobody/0", "--dsn", db, "--reason", "why")
    assert "airflow pgchange status" in failed(caught)


@pytest.mark.parametrize("command", [["trim", "--keep", "soon"], ["letters", "drop", "--older-than", "soon"]])
def test_a_span_that_is_none_is_answered_with_how_to_write_one_before_anybody_is_asked(
    db: str, pgchange: Command, command: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange(*command, "--dsn", db)
    assert "30 days" in failed(caught)


def test_a_role_that_may_not_install_is_told_who_may(
    bare_db: str, connect_to: Connect, pgchange: Command
) -> None:
    role = f"passer_by_{os.getpid()}"
    connect_to(bare_db).execute(f"create role {role} login")
    try:
        with pytest.raises(SystemExit) as caught:
            pgchange("install", "--dsn", make_conninfo(bare_db, user=role))
    finally:
        connect_to(bare_db).execute(f"drop role {role}")
    assert "grant create on database" in failed(caught)


@pytest.mark.parametrize("command", ["status", "upgrade", "install"])
def test_a_command_that_finds_nothing_says_what_that_means(
    db: str, bare_db: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arguments = {"status": ["--dsn", db], "upgrade": ["--dsn", bare_db], "install": ["--dsn", db]}[command]
    args = get_parser().parse_args(["pgchange", command, *arguments])
    args.func(args)
    said = capsys.readouterr()
    assert {"status": "first claim", "upgrade": "pgchange install", "install": "revision"}[command] in (
        said.out + said.err
    )


@pytest.fixture
def failing_worker(db: str, connect: Callable[..., Any]) -> str:
    """A worker of a tube with a batch that failed."""
    connection = connect()
    connection.execute("create table item (id bigint primary key)")
    make(connection, "copies")
    attach(connection, tube="copies")
    connection.execute("insert into item values (1), (2)")
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(TubeFeed("copies"), db) as consumer:
        consumer.claim(10)
        raise ZeroDivisionError
    return db


def test_status_shows_the_workers_of_tubes_too(failing_worker: str, pgchange: Command) -> None:
    (found,) = pgchange("status", "--dsn", failing_worker)
    assert (found["consumer"], found["ready"], found["attempt"]) == ("tube:copies/0", 2, 1)


def test_a_worker_of_a_tube_gives_up_a_batch_by_the_name_that_status_shows(
    failing_worker: str, pgchange: Command
) -> None:
    (done,) = pgchange("skip", "tube:copies/0", "--dsn", failing_worker, "--reason", "cannot be parsed")
    assert done["consumer"] == "tube:copies/0"
    (found,) = pgchange("status", "--dsn", failing_worker)
    assert (found["ready"], found["batch_id"]) == (0, None)


@pytest.mark.parametrize(
    ("worker", "says"), [("tube:copies/7", "no worker 7 of 1"), ("tube:nosuch/0", "no tube nosuch")]
)
def test_a_worker_that_a_tube_does_not_have_is_told(
    failing_worker: str, pgchange: Command, worker: str, says: str
) -> None:
    with pytest.raises(SystemExit, match=says):
        pgchange("skip", worker, "--dsn", failing_worker, "--reason", "cannot be parsed")


@pytest.fixture(params=["beside", "elsewhere"])
def failing_group(
    request: pytest.FixtureRequest, db: str, other_db: str, connect_to: Callable[..., Any]
) -> list[str]:
    """A group of the event log that read one event and failed on the next of three; the options that name where it is."""
    source = db if request.param == "beside" else other_db
    publisher = connect_to(source)
    subscribe(publisher, "mails")
    publish(publisher, "a", "b", "c")
    with ConsumerTransaction(EventFeed("mails"), db, source) as consumer:
        consumer.claim(1)
        consumer.ack()
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(EventFeed("mails"), db, source) as consumer:
        consumer.claim(1)
        raise ZeroDivisionError
    return ["--dsn", db] + (["--source-dsn", source] if source != db else [])


def test_status_shows_the_groups_of_the_event_log_too(failing_group: list[str], pgchange: Command) -> None:
    (found,) = pgchange("status", *failing_group)
    assert (found["consumer"], found["ready"], found["attempt"]) == ("events:mails", 2, 1)


def test_a_group_gives_up_a_batch_by_the_name_that_status_shows(
    failing_group: list[str], pgchange: Command
) -> None:
    pgchange("skip", "events:mails", *failing_group, "--reason", "a poisonous event")
    (found,) = pgchange("status", *failing_group)
    assert (found["ready"], found["batch_id"]) == (1, None)
    with pytest.raises(SystemExit, match="no batch in work"):
        pgchange("skip", "events:mails", *failing_group, "--reason", "again")


@pytest.mark.parametrize(("to", "ahead"), [("now", 0), ("beginning", 4), ("2001-01-01T00:00:00+00:00", 4)])
def test_move_takes_a_group_elsewhere_and_what_is_published_later_comes(
    failing_group: list[str], pgchange: Command, connect_to: Callable[..., Any], to: str, ahead: int
) -> None:
    source = connect_to(failing_group[-1])
    publish(source, "not dispatched yet")
    pgchange("move", "events:mails", *failing_group, "--to", to, "--yes")
    (found,) = pgchange("status", *failing_group)
    assert found["ready"] + found["waiting"] == ahead
    publish(source, "later")
    with ConsumerTransaction(EventFeed("mails"), failing_group[1], failing_group[-1]) as consumer:
        assert consumer.claim(10)
        assert [change.data["topic"] for change in consumer.changes()][-1] == "later"
        consumer.ack()


def test_a_group_is_repaired_and_dropped(failing_group: list[str], pgchange: Command) -> None:
    (found,) = pgchange("repair", "events:mails", *failing_group, "--yes")
    assert found["from_here_on"] == "exactly once"
    pgchange("drop", "events:mails", *failing_group, "--yes")
    assert pgchange("status", *failing_group) == []
    with pytest.raises(SystemExit, match="no group"):
        pgchange("move", "events:mails", *failing_group, "--to", "now", "--yes")


def test_a_group_whose_source_lost_its_tail_is_shown_as_held_back(
    db: str, other_db: str, connect_to: Callable[..., Any], pgchange: Command
) -> None:
    source = connect_to(other_db)
    subscribe(source, "mails")
    publish(source, "a")
    with ConsumerTransaction(EventFeed("mails"), db, other_db) as consumer:
        consumer.claim(1)
        consumer.ack()
    source.execute("delete from pgmb.claim")
    (found,) = pgchange("status", "--dsn", db, "--source-dsn", other_db)
    assert found["ready"] is None
    assert "lost its latest transactions" in found["held_back_by"]


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
def test_a_consumer_of_a_topology_is_shown_repaired_moved_and_dropped(
    db: str, other_db: str, connect_to: Callable[..., Any], pgchange: Command, where: str
) -> None:
    source = db if where == "beside" else other_db
    make_catalogue(connect_to(source))
    with ConsumerTransaction(TopologyFeed("watcher"), db, source) as consumer:
        batch = consumer.claim(2)
        assert batch is not None
        consumer.ack()
    options = ["--dsn", db] + (["--source-dsn", source] if source != db else [])
    (found,) = pgchange("status", *options)
    assert (found["consumer"], found["held_back_by"]) == ("topology:watcher", None)
    ahead = found["ready"]
    pgchange("move", "topology:watcher", *options, "--to", "beginning", "--yes")
    assert pgchange("status", *options)[0]["ready"] == ahead + 2
    pgchange("move", "topology:watcher", *options, "--to", "now", "--yes")
    assert pgchange("status", *options)[0]["ready"] == 0
    with pytest.raises(SystemExit, match="beginning or now"):
        pgchange("move", "topology:watcher", *options, "--to", "2026-01-31T12:00:00+00:00", "--yes")
    assert pgchange("repair", "topology:watcher", *options, "--yes")[0]["from_here_on"]
    pgchange("drop", "topology:watcher", *options, "--yes")
    assert pgchange("status", *options) == []


def test_the_topology_relay_serves_until_it_is_stopped(db: str) -> None:
    with psycopg.connect(db, autocommit=True) as connection:
        make_catalogue(connection)
    port = free_port()
    process = subprocess.Popen(
        [
            Path(sys.executable).with_name("airflow"),
            "pgchange",
            "topology-relay",
            "--dsn",
            db,
            "--listen",
            f"127.0.0.1:{port}",
            "--trust",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while "in term" not in (line := process.stderr.readline()):
            assert line, "it ended before it served"
        with TopologyClient(f"host=127.0.0.1 port={port} user=ann dbname=any") as client:
            assert client.topology.owner("default", 1) == "uuid-r1"
        process.terminate()
        assert "stopped" in process.communicate(timeout=60)[1]
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "say who may connect"),
        (["--trust", "--listen", "4327"], "not an address to listen on"),
        (["--trust", "--tls-cert", "cert.pem"], "both --tls-cert and --tls-key"),
        (["--trust", "--tls-cert", "none.pem", "--tls-key", "none.pem"], "not a certificate and its key"),
        (["--users", "none"], "cannot be read"),
        (["--users", "none", "--trust"], "say who may connect"),
        (["--trust", "--max-clients", "0"], "at least 1"),
    ],
)
def test_a_topology_relay_that_cannot_serve_says_why(db: str, options: list[str], reason: str) -> None:
    args = get_parser().parse_args(["pgchange", "topology-relay", "--dsn", db, *options])
    with pytest.raises(SystemExit) as caught:
        args.func(args)
    assert reason in failed(caught)


def test_a_consumer_of_a_queue_is_shown_and_gives_up_a_batch(
    db: str, connect: Connect, pgchange: Command
) -> None:
    connection = connect()
    connection.execute("select mbus.create_queue('orders', 4), mbus.post('orders', 'n=>1')")
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(QueueFeed("orders"), db) as consumer:
        consumer.claim(10)
        raise ZeroDivisionError
    (found,) = pgchange("status", "--dsn", db)
    assert (found["consumer"], found["ready"], found["attempt"]) == ("queue:orders/default", 1, 1)
    pgchange("skip", "queue:orders/default", "--dsn", db, "--reason", "cannot be parsed")
    (found,) = pgchange("status", "--dsn", db)
    assert (found["ready"], found["batch_id"]) == (0, None)
    assert connection.execute("select reason from dead_letter.list()").fetchone() == ("cannot be parsed",)
