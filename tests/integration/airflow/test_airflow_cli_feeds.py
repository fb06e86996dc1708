"""``airflow-pgchange`` for each kind of feed, on a real server: workers of tubes, groups, topologies and queues."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_pgchange.errors import SourceRestored
from airflow_pgchange.feeds import ConsumerTransaction, EventFeed, QueueFeed, TopologyFeed, TubeFeed
from airflow_pgchange.lake import write
from airflow_pgchange.topology import TopologyClient
from demo.postgres import free_port
from tests import deltas
from tests.command_line import Command, failed, parsed
from tests.events import publish, subscribe
from tests.lakes import payments
from tests.ledger import Connect
from tests.suite.servers import one_of
from tests.topology import make_catalogue
from tests.tubes import attach, make

pytestmark = pytest.mark.usefixtures("few_sessions")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A normal run tests source and results either in one database or in two. A release tests both."""
    if "where" in metafunc.fixturenames:
        metafunc.parametrize("where", one_of(["beside", "elsewhere"], metafunc))


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


@pytest.fixture
def failing_group(where: str, db: str, other_db: str, connect_to: Callable[..., Any]) -> list[str]:
    """A group of the event log that has read one event, and has failed on the next of three. Return the options with its
    databases."""
    source = db if where == "beside" else other_db
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


def test_a_delta_table_accepts_the_batch_in_work_after_a_restore(
    failing_worker: str, pgchange: Command, tmp_path: Path
) -> None:
    lake, found = deltas.made(str(tmp_path)), payments((1, "a", 1))

    def process(id: str | None = None) -> None:
        with ConsumerTransaction(TubeFeed("copies"), failing_worker) as consumer:
            batch = consumer.claim(10)
            assert batch is not None
            consumer.ack(lambda results: write(results, replace(batch, id=id or batch.id), lake, found))
            if id:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        process("a batch after the time of the backup")
    with pytest.raises(SourceRestored, match="airflow-pgchange repair tube:copies/0 --delta"):
        process()
    options = ["--dsn", failing_worker, "--delta", lake.location, "--yes"]
    assert pgchange("repair", "tube:copies/0", *options)[0]["table"] == lake.location
    process()
    assert [row["id"] for row in deltas.rows(lake)] == [1, 1]


def test_a_group_is_repaired_and_dropped(failing_group: list[str], pgchange: Command) -> None:
    (found,) = pgchange("repair", "events:mails", *failing_group, "--yes")
    assert found["from_here_on"] == "exactly once"
    pgchange("drop", "events:mails", *failing_group, "--yes")
    assert pgchange("status", *failing_group) == []
    with pytest.raises(SystemExit, match="events:mails has no progress here"):
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
    source.execute("delete from pgchange.claim")
    (found,) = pgchange("status", "--dsn", db, "--source-dsn", other_db)
    assert found["ready"] is None
    assert "lost its latest transactions" in found["held_back_by"]


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
    """Takes seconds: the command line loads Airflow."""
    with psycopg.connect(db, autocommit=True) as connection:
        make_catalogue(connection)
    port = free_port()
    process = subprocess.Popen(
        [
            Path(sys.executable).with_name("airflow-pgchange"),
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
    # Kill the process if it logs nothing, so that the test does not wait for ever.
    silent = threading.Timer(60, process.kill)
    silent.start()
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
        silent.cancel()
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
    args = parsed("topology-relay", "--dsn", db, *options)
    with pytest.raises(SystemExit) as caught:
        args.func(args)
    assert reason in failed(caught)


@pytest.mark.hstore
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
    assert connection.execute("select reason from pgchange.letters()").fetchone() == ("cannot be parsed",)
