"""Publishing in the caller's transaction, and from a buffer that neither loses nor duplicates events."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import InvalidArgument, NotPublished, PublisherFull
from airflow_pgchange.events import Event, Publisher, publish, sender
from airflow_pgchange.events.event import event_id
from airflow_pgchange.feeds.retries import succeeds
from tests.publishing import HOUR, POISON, SECONDS, TAKEN, be_impatient, numbers, stored


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    be_impatient(monkeypatch)


@pytest.mark.parametrize("count", [1, 7, 3000])
def test_events_are_kept_in_the_order_in_which_they_were_published(connect, count):
    connection = connect()
    publish(connection, numbers(count))
    assert stored(connection) == list(range(count))


def test_everything_of_an_event_is_kept(connect):
    connection = connect()
    payload = {"text": 'quote " tab \t newline \n backslash \\ \\N é', "none": None, "deep": [1, {"a": 2.5}]}
    publish(connection, Event("a.b", payload, {"by": "me"}, subscription_id="su1"))
    row = connection.execute("select topic, payload, metadata, subscription_id from pgmb.events").fetchone()
    assert row == ("a.b", payload, {"by": "me"}, "su1")


@pytest.mark.parametrize("payload", [None, True, 7, "text", [], {}])
def test_any_json_is_a_payload(connect, payload):
    connection = connect()
    publish(connection, Event("t", payload))
    assert connection.execute("select payload from pgmb.events").fetchone() == (payload,)


def test_nothing_is_published_by_a_transaction_that_is_rolled_back(connect):
    connection = connect()
    with connection.transaction(force_rollback=True):
        publish(connection, numbers(3))
        assert stored(connection) == [0, 1, 2]
    assert stored(connection) == []


def test_ids_are_returned_in_the_order_of_the_events(connect):
    connection = connect()
    later = datetime.now(UTC) + HOUR
    events = [Event("now"), Event("later", at=later), Event("given", id=event_id(later, 5)), Event("now")]
    ids = publish(connection, events, returning=True)
    found = {row[0]: row[1] for row in connection.execute("select id, topic from pgmb.events")}
    assert [found[one] for one in ids] == [event.topic for event in events]
    assert ids[0] < ids[3] < ids[2]


def test_an_event_with_a_time_is_scheduled_for_it(connect):
    connection = connect()
    at = datetime.now(UTC).replace(microsecond=123456) + HOUR
    publish(connection, [Event("t", {"n": 1}), Event("t", {"n": 2}, at=at)])
    row = connection.execute(
        "select pgmb.extract_date_from_event_id(id) = %s, id in (select event_id from pgmb.scheduled) "
        "from pgmb.events where payload ->> 'n' = '2'",
        [at],
    ).fetchone()
    assert row == (True, True)
    assert connection.execute("select count(*) from pgmb.scheduled").fetchone() == (1,)


def test_many_events_of_one_moment_keep_their_order(connect):
    connection = connect()
    at = datetime.now(UTC) + HOUR
    for start in range(0, 300, 100):
        publish(connection, [Event("t", {"n": n}, at=at) for n in range(start, start + 100)])
    assert stored(connection) == list(range(300))


@pytest.mark.parametrize("payload", [POISON, {"half": "\ud800"}], ids=["nul", "surrogate"])
def test_a_value_that_postgresql_cannot_store_is_refused_by_name(connect, payload):
    connection = connect()
    with pytest.raises(InvalidArgument, match="an event was refused"):
        publish(connection, [Event("t", {"n": 1}), Event("t", payload)])
    assert stored(connection) == []


def test_an_id_that_is_there_already_is_refused(connect):
    connection = connect()
    (made,) = publish(connection, Event("t"), returning=True)
    with pytest.raises(InvalidArgument, match="already exists"):
        publish(connection, Event("t", id=made))


def test_nothing_is_published_of_no_events(connect):
    assert publish(connect(), [], returning=True) == []


def test_publishing_needs_no_session_of_its_own(pgbouncer, connect):
    with psycopg.connect(pgbouncer, prepare_threshold=None) as connection:
        publish(connection, numbers(50), returning=True)
    assert stored(connect()) == list(range(50))


def test_a_buffer_flushes_by_size(db, connect):
    connection = connect()
    with Publisher(db, limit=10, max_age=3600) as publisher:
        publisher.put(numbers(25))
        with publisher._changed:
            assert publisher._changed.wait_for(lambda: publisher._settled == 20, 30)
        assert stored(connection) == list(range(20))
    assert stored(connection) == list(range(25))


def test_a_buffer_flushes_by_time(db, connect):
    with Publisher(db, limit=1000, max_age=0.01) as publisher:
        publisher.put(Event("t", {"n": 0}))
        with publisher._changed:
            assert publisher._changed.wait_for(lambda: publisher._settled == 1, 30)
        assert stored(connect()) == [0]


def test_a_flush_returns_when_all_is_committed(db, connect):
    with Publisher(db, max_age=3600) as publisher:
        publisher.put(numbers(5))
        publisher.flush()
        assert stored(connect()) == list(range(5))


def test_each_thread_keeps_its_order(db, connect):
    with Publisher(db, limit=7) as publisher:

        def work(topic):
            for n in range(500):
                publisher.put(Event(topic, {"n": n}))

        threads = [threading.Thread(target=work, args=[f"t{k}"]) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    connection = connect()
    for k in range(4):
        rows = connection.execute(
            "select (payload ->> 'n')::int from pgmb.events where topic = %s order by id", [f"t{k}"]
        )
        assert [n for (n,) in rows] == list(range(500))


PROGRAM = """
import sys
from airflow_pgchange.events import Event, Publisher
publisher = Publisher(sys.argv[1], max_age=3600)
publisher.put([Event("t", {"n": n}) for n in range(100)])
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('oops')"])
def test_a_program_that_ends_without_closing_loses_nothing(db, connect, end):
    subprocess.run([sys.executable, "-c", PROGRAM + end, db], check=False, capture_output=True)
    assert stored(connect()) == list(range(100))


def test_a_program_that_ends_while_the_server_is_away_says_what_it_could_not_send(db):
    away = make_conninfo(db, port=1)
    code = "from airflow_pgchange.events import publisher as p; p.Publisher.close.__defaults__ = (0.2,)\n"
    ended = subprocess.run(
        [sys.executable, "-c", code + PROGRAM, away], check=False, capture_output=True, text=True
    )
    assert "NotPublished: events that were not published: 100 (0 refused, 100 unsent)" in ended.stderr


def test_a_payload_that_is_no_json_is_refused_by_put(db, connect):
    with Publisher(db) as publisher, pytest.raises(InvalidArgument, match="not JSON"):
        publisher.put([Event("t", {"n": 1}), Event("t", object())])
    assert stored(connect()) == [1]


"""Return the ids of an event that is in the log already, and of two new events."""


def test_a_publishers_rights_are_enough(connect, role, monkeypatch):
    other, connection = role("publisher"), connect()
    connection.execute("select pgmb.grant_writer(%s::regrole)", [other.name])
    # Publish as after a commit whose answer was lost with the connection.
    monkeypatch.setattr(sender, "copy_rows", sender.insert_if_absent)
    there = Event("t", {"n": 0}, id=TAKEN)
    publish(connection, there)
    with Publisher(other.conninfo) as publisher:
        publisher.put(there)
        publisher.put([*numbers(3)[1:], Event("t", {"n": 3}, at=datetime.now(UTC) + HOUR)])
    with psycopg.connect(other.conninfo) as limited:
        publish(limited, Event("t", {"n": 4}, at=datetime.now(UTC) + 2 * HOUR))
    assert stored(connection) == list(range(5))


def test_a_buffer_may_wait_for_ever(db, connect):
    with Publisher(db, limit=2, max_age=None) as publisher:
        publisher.put(numbers(3))
        assert succeeds(lambda: stored(connect()) == [0, 1], SECONDS)
        publisher.flush(timeout=SECONDS)
        assert stored(connect()) == [0, 1, 2]


@pytest.mark.parametrize("nonsense", [-1, float("nan"), float("inf"), 10**400, "soon", True])
def test_a_time_to_wait_that_is_none_is_refused(db, nonsense):
    with pytest.raises(InvalidArgument, match="max_age"):
        Publisher(db, max_age=nonsense)


def test_the_memory_is_bounded_and_who_puts_more_is_told(db, connect):
    away = make_conninfo(db, port=1)
    publisher = Publisher(away, memory=10_000)
    with pytest.raises(PublisherFull, match="server is away|events wait"):
        publisher.put(numbers(100), timeout=0)
    with pytest.raises(NotPublished) as raised:
        publisher.close(timeout=0.1)
    assert [event.payload["n"] for event in raised.value.events] == list(range(len(raised.value.events)))
    assert 1 <= len(raised.value.events) < 10


def test_put_waits_while_the_buffer_is_full(db, connect, monkeypatch):
    blocked, connect_really = threading.Event(), sender.connect

    def later(*arguments, **more):
        blocked.wait(30)
        return connect_really(*arguments, **more)

    monkeypatch.setattr(sender, "connect", later)
    with Publisher(db, memory=10_000) as publisher:
        with pytest.raises(PublisherFull):
            publisher.put(numbers(100), timeout=0.05)
        put_so_far = publisher._accepted
        assert put_so_far < 10
        thread = threading.Thread(target=publisher.put, args=[[Event("t", {"n": put_so_far})]])
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        blocked.set()
        thread.join(30)
    assert stored(connect()) == list(range(put_so_far + 1))


def put_and_end(conninfo):
    Publisher(conninfo).put(Event("t", {"n": 1}))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_multiprocessing_that_ends_loses_nothing(db, connect, method):
    process = multiprocessing.get_context(method).Process(target=put_and_end, args=[db])
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    assert stored(connect()) == [1]


def test_an_event_larger_than_the_memory_goes_alone(db, connect):
    with Publisher(db, memory=5_000) as publisher:
        publisher.put(Event("t", {"n": 1, "text": "x" * 50_000}), timeout=0)
    assert stored(connect()) == [1]


def test_a_closed_publisher_takes_nothing(db):
    publisher = Publisher(db)
    publisher.close()
    publisher.close()
    with pytest.raises(InvalidArgument, match="closed"):
        publisher.put(Event("t"))


def test_a_publisher_of_another_process_is_refused(db, monkeypatch):
    with Publisher(db) as publisher:
        monkeypatch.setattr(publisher, "_process", -1)
        with pytest.raises(InvalidArgument, match="after the fork"):
            publisher.put(Event("t"))
        monkeypatch.undo()
