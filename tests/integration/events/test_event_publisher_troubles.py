"""A publisher's buffer when the server refuses, stalls or disappears: no event is lost or duplicated."""

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import InvalidArgument, NotPublished
from airflow_pgchange.events import Event, Publisher, publish, sender
from airflow_pgchange.events.event import row_of
from airflow_pgchange.events.publishing import insert_if_absent, with_ids
from airflow_pgchange.feeds.retries import succeeds
from tests.publishing import HOUR, POISON, SECONDS, TAKEN, TWICE, be_impatient, numbers, stored, topics


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    be_impatient(monkeypatch)


def test_a_refused_event_holds_no_other_up_and_is_told(db, connect, caplog):
    publisher = Publisher(db)
    publisher.put(
        [Event("t", {"n": 1}), Event("t", POISON), Event("t", {"n": 2}), Event("t", POISON, {"k": 1})]
    )
    with pytest.raises(NotPublished, match="2 refused, 0 unsent") as raised:
        publisher.close()
    assert [(event.payload, event.metadata) for event in raised.value.events] == [
        (POISON, {}),
        (POISON, {"k": 1}),
    ]
    assert stored(connect()) == [1, 2]
    assert "events were refused" in caplog.text


def test_an_event_that_is_too_much_for_the_server_holds_no_other_up(db, connect):
    """The payload is JSON that is nested too deeply for PostgreSQL to parse."""
    nested = functools.reduce(lambda inner, _: [inner], range(800), [])
    publisher = Publisher(make_conninfo(db, options="-c max_stack_depth=100kB"))
    publisher.put([Event("t", {"n": 1}), Event("t", nested), Event("t", {"n": 2})])
    with pytest.raises(NotPublished, match="1 refused, 0 unsent"):
        publisher.close(timeout=SECONDS)
    assert stored(connect()) == [1, 2]


@pytest.mark.parametrize("unsendable", [Event("\ud800"), Event("t", subscription_id="\ud800")])
def test_an_event_that_no_connection_can_send_holds_no_other_up(db, connect, unsendable):
    publisher = Publisher(db)
    publisher.put([Event("t", {"n": 1}), unsendable, Event("t", {"n": 2})])
    with pytest.raises(NotPublished, match="1 refused, 0 unsent") as raised:
        publisher.flush(timeout=SECONDS)
    assert raised.value.events[0].topic == unsendable.topic
    publisher.close(timeout=SECONDS)
    assert stored(connect()) == [1, 2]


@pytest.mark.parametrize("timeout", ["statement_timeout", "lock_timeout"])
def test_a_lock_on_the_log_beyond_the_timeout_loses_no_event(db, connect, caplog, timeout):
    locking, setting = connect(), connect()
    name = locking.info.dbname
    setting.execute(f"alter database {name} set {timeout} = 50")
    publisher = Publisher(db, max_age=0.01)
    with locking.transaction():
        locking.execute("lock table pgmb.events in access exclusive mode")
        publisher.put(Event("t", {"n": 1}))
        assert succeeds(lambda: "could not publish 1 events" in caplog.text, SECONDS)
        # From now on a new connection succeeds, though slowly.
        setting.execute(f"alter database {name} reset {timeout}")
    publisher.close(timeout=SECONDS)
    assert stored(connect()) == [1]


def test_an_error_that_nobody_thought_of_leaves_the_publisher_at_work(db, connect, monkeypatch):
    tried = iter([True])

    def broken(*args):
        if next(tried, None):
            raise LookupError("nobody thought of this")
        return with_ids(*args)

    monkeypatch.setattr(sender, "with_ids", broken)
    publisher = Publisher(db)
    publisher.put(Event("t", {"n": 1}))
    with pytest.raises(NotPublished, match="1 refused, 0 unsent.*nobody thought"):
        publisher.flush(timeout=SECONDS)
    publisher.put(Event("t", {"n": 2}))
    publisher.close(timeout=SECONDS)
    assert stored(connect()) == [2]


def test_an_unpublished_event_is_reported_once(db):
    with Publisher(db) as publisher:
        publisher.put(Event("t", POISON))
        with pytest.raises(NotPublished):
            publisher.flush()
        publisher.flush()


def test_a_database_without_the_schema_is_told_and_the_events_with_it(bare_db):
    publisher = Publisher(bare_db)
    publisher.put(numbers(3))
    with pytest.raises(NotPublished, match="pgmb") as raised:
        publisher.close()
    assert [event.payload["n"] for event in raised.value.events] == [0, 1, 2]


def test_a_server_that_comes_back_gets_everything_once_and_in_order(own_cluster, own_database):
    with Publisher(own_database, limit=50, max_age=0.01) as publisher:
        publisher.put(numbers(100))
        publisher.flush()
        own_cluster.stop("immediate")
        publisher.put(Event("t", {"n": n}) for n in range(100, 400))
        assert succeeds(lambda: publisher._last_error is not None, SECONDS)
        own_cluster.start()
    with psycopg.connect(own_database) as connection:
        assert stored(connection) == list(range(400))


def lose_one_commit(monkeypatch, killer, committed):
    """Kill the backend of the first batch before or after its commit. Return the list of the killed backends."""
    died = []
    commit = sender.Sender._commit

    def dying(self, rows, write):
        if died:
            return commit(self, rows, write)
        died.append(self._connection.info.backend_pid)
        if committed:
            commit(self, rows, write)
        killer.execute("select pg_terminate_backend(%s, 10000)", died)
        self._connection.execute("select 1")
        raise AssertionError("the backend has not ended")

    monkeypatch.setattr(sender.Sender, "_commit", dying)
    return died


@pytest.mark.parametrize("committed", [False, True])
def test_a_connection_lost_in_the_commit_neither_loses_nor_doubles(db, connect, monkeypatch, committed):
    """The backend dies before or after the commit, and the publisher cannot know which."""
    died = lose_one_commit(monkeypatch, connect(), committed)
    with Publisher(db) as publisher:
        publisher.put([*numbers(20), Event("t", {"n": 20}, at=datetime.now(UTC) + HOUR)])
    assert len(died) == 1
    assert stored(connect()) == list(range(21))
    assert connect().execute("select sum(cardinality(ids)) from pgmb.published").fetchone() == (20,)


"""Return the ids of an event that is in the log already, and of two new events."""


def test_an_id_that_is_taken_is_refused_though_the_server_was_away(own_cluster, own_database):
    with psycopg.connect(own_database) as connection:
        publish(connection, Event("first", id=TAKEN))
    own_cluster.stop("immediate")
    publisher = Publisher(own_database)
    publisher.put([Event("second", id=TAKEN), Event("one", id=TWICE), Event("two", id=TWICE)])
    assert succeeds(lambda: publisher._last_error is not None, SECONDS)
    own_cluster.start()
    with pytest.raises(NotPublished, match="already exists") as raised:
        publisher.close()
    assert [event.topic for event in raised.value.events] == ["second", "two"]
    with psycopg.connect(own_database) as connection:
        assert topics(connection) == ["first", "one"]


@pytest.mark.parametrize("committed", [False, True])
def test_an_id_that_is_taken_is_refused_though_a_connection_was_lost_in_the_commit(
    db, connect, monkeypatch, committed
):
    publish(connect(), Event("first", id=TAKEN))
    died = lose_one_commit(monkeypatch, connect(), committed)
    publisher = Publisher(db)
    publisher.put([Event("second", id=TAKEN), Event("one", id=TWICE), Event("two", id=TWICE), Event("three")])
    with pytest.raises(NotPublished, match=TAKEN) as raised:
        publisher.close()
    assert len(died) == 1
    assert [event.topic for event in raised.value.events] == ["second", "two"]
    assert topics(connect()) == ["first", "one", "three"]


@pytest.mark.parametrize(
    "other", [{"topic": "u"}, {"payload": [2]}, {"metadata": {"a": 2}}, {"subscription_id": "su2"}], ids=str
)
def test_what_is_there_under_an_id_is_the_same_event_only_where_all_of_it_is(connect, other):
    connection = connect()
    event = Event("t", [1.50, None], {"a": 1}, None, "su1", TAKEN)
    publish(connection, event)
    insert_if_absent(connection, [row_of(event)])
    with pytest.raises(InvalidArgument, match=f"a different event has the same id.*{TAKEN}"):
        insert_if_absent(connection, [row_of(replace(event, **other))])
    assert connection.execute("select count(*) from pgmb.events").fetchone() == (1,)


def test_killed_backends_in_the_middle_of_publishing_lose_nothing(db, connect):
    killer, killed = connect(), []

    def kill():
        rows = killer.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and application_name = 'victim'"
        )
        found = rows.fetchall()
        killed.extend(found)
        return bool(found)

    with Publisher(make_conninfo(db, application_name="victim"), limit=20) as publisher:
        for n in range(3000):
            publisher.put(Event("t", {"n": n}))
            if n % 300 == 150:
                assert succeeds(kill, SECONDS)
    assert len(killed) >= 10
    assert stored(connect()) == list(range(3000))


def test_a_batch_that_takes_longer_than_a_statement_may_goes_in_parts(db, connect):
    connection = connect()
    connection.execute("""
        create function public.slow() returns trigger language plpgsql as $$
        begin
            perform pg_sleep(0.01);
            return new;
        end
        $$;
        create trigger slow before insert on pgmb.events for each row execute function public.slow()
    """)
    limited = make_conninfo(db, options="-c statement_timeout=400ms")
    with Publisher(limited, limit=100) as publisher:
        publisher.put(numbers(100))
        publisher.flush()
    assert stored(connection) == list(range(100))
