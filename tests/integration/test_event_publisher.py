"""Publishing: in the caller's transaction, and from a buffer that loses and doubles nothing."""

from __future__ import annotations

import functools
import multiprocessing
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange.events import Event, Publisher, publish
from airflow_pgchange.events import publisher as publisher_module
from airflow_pgchange.events.event import event_id, row_of
from airflow_pgchange.events.publish import insert_if_absent, with_ids
from airflow_pgchange.feeds.errors import InvalidArgument, NotPublished, PublisherFull
from airflow_pgchange.feeds.retrying import succeeds

HOUR = timedelta(hours=1)
SECONDS = 30
POISON = {"word": "\0"}
"""JSON, but nothing that PostgreSQL can hold."""


def numbers(count, **more):
    return [Event("t", {"n": n}, **more) for n in range(count)]


def stored(connection):
    rows = connection.execute("select payload ->> 'n' from pgmb.events order by id").fetchall()
    return [int(n) for (n,) in rows]


def topics(connection):
    return [topic for (topic,) in connection.execute("select topic from pgmb.events order by id")]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(publisher_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(publisher_module, "LONGEST_PAUSE", 0.05)


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
def test_what_postgresql_cannot_hold_is_refused_by_name(connect, payload):
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
    with Publisher(db, flush_events=10, flush_after=3600) as publisher:
        publisher.put(numbers(25))
        with publisher._changed:
            assert publisher._changed.wait_for(lambda: publisher._settled == 20, 30)
        assert stored(connection) == list(range(20))
    assert stored(connection) == list(range(25))


def test_a_buffer_flushes_by_time(db, connect):
    with Publisher(db, flush_events=1000, flush_after=0.01) as publisher:
        publisher.put(Event("t", {"n": 0}))
        with publisher._changed:
            assert publisher._changed.wait_for(lambda: publisher._settled == 1, 30)
        assert stored(connect()) == [0]


def test_a_flush_returns_when_all_is_committed(db, connect):
    with Publisher(db, flush_after=3600) as publisher:
        publisher.put(numbers(5))
        publisher.flush()
        assert stored(connect()) == list(range(5))


def test_each_thread_keeps_its_order(db, connect):
    with Publisher(db, flush_events=7) as publisher:

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
publisher = Publisher(sys.argv[1], flush_after=3600)
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
    """Nested deeper than such a server can follow."""
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
def test_who_locks_the_log_for_longer_than_a_timeout_costs_no_event(db, connect, caplog, timeout):
    locking, setting = connect(), connect()
    name = locking.info.dbname
    setting.execute(f"alter database {name} set {timeout} = 50")
    publisher = Publisher(db, flush_after=0.01)
    with locking.transaction():
        locking.execute("lock table pgmb.events in access exclusive mode")
        publisher.put(Event("t", {"n": 1}))
        assert succeeds(lambda: "1 events wait to be published" in caplog.text, SECONDS)
        # A connection that comes now may take its time.
        setting.execute(f"alter database {name} reset {timeout}")
    publisher.close(timeout=SECONDS)
    assert stored(connect()) == [1]


def test_an_error_that_nobody_thought_of_leaves_the_publisher_at_work(db, connect, monkeypatch):
    tried = iter([True])

    def broken(*args):
        if next(tried, None):
            raise LookupError("nobody thought of this")
        return with_ids(*args)

    monkeypatch.setattr(publisher_module, "with_ids", broken)
    publisher = Publisher(db)
    publisher.put(Event("t", {"n": 1}))
    with pytest.raises(NotPublished, match="1 refused, 0 unsent.*nobody thought"):
        publisher.flush(timeout=SECONDS)
    publisher.put(Event("t", {"n": 2}))
    publisher.close(timeout=SECONDS)
    assert stored(connect()) == [2]


def test_what_was_told_once_is_not_told_again(db):
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


def test_what_is_no_json_is_refused_when_it_is_put(db, connect):
    with Publisher(db) as publisher, pytest.raises(InvalidArgument, match="not JSON"):
        publisher.put([Event("t", {"n": 1}), Event("t", object())])
    assert stored(connect()) == [1]


def test_a_server_that_comes_back_gets_everything_once_and_in_order(own_cluster, own_database):
    with Publisher(own_database, flush_events=50, flush_after=0.01) as publisher:
        publisher.put(numbers(100))
        publisher.flush()
        own_cluster.stop("immediate")
        publisher.put(Event("t", {"n": n}) for n in range(100, 400))
        assert succeeds(lambda: publisher._trouble is not None, SECONDS)
        own_cluster.start()
    with psycopg.connect(own_database) as connection:
        assert stored(connection) == list(range(400))


def lose_one_commit(monkeypatch, killer, committed):
    """Kill the backend of the first batch before or after its commit; the list of those that died."""
    died = []
    commit = Publisher._commit

    def dying(self, rows, write):
        if died:
            return commit(self, rows, write)
        died.append(self._connection.info.backend_pid)
        if committed:
            commit(self, rows, write)
        killer.execute("select pg_terminate_backend(%s, 10000)", died)
        self._connection.execute("select 1")
        raise AssertionError("the backend lives")

    monkeypatch.setattr(Publisher, "_commit", dying)
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


TAKEN, TWICE = event_id(datetime.now(UTC), 1), event_id(datetime.now(UTC), 2)
"""Ids of an event that is there already, and of two that are put."""


def test_an_id_that_is_taken_is_refused_though_the_server_was_away(own_cluster, own_database):
    with psycopg.connect(own_database) as connection:
        publish(connection, Event("first", id=TAKEN))
    own_cluster.stop("immediate")
    publisher = Publisher(own_database)
    publisher.put([Event("second", id=TAKEN), Event("one", id=TWICE), Event("two", id=TWICE)])
    assert succeeds(lambda: publisher._trouble is not None, SECONDS)
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
    with pytest.raises(InvalidArgument, match=f"another event is there.*{TAKEN}"):
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

    with Publisher(make_conninfo(db, application_name="victim"), flush_events=20) as publisher:
        for n in range(3000):
            publisher.put(Event("t", {"n": n}))
            if n % 300 == 150:
                assert succeeds(kill, SECONDS)
    assert len(killed) >= 10
    assert stored(connect()) == list(range(3000))


def test_a_publishers_rights_are_enough(connect, role, monkeypatch):
    other, connection = role("publisher"), connect()
    connection.execute("select pgmb.grant_publisher(%s::regrole)", [other.name])
    # As after a connection that was lost in its commit.
    monkeypatch.setattr(publisher_module, "copy_rows", publisher_module.insert_if_absent)
    there = Event("t", {"n": 0}, id=TAKEN)
    publish(connection, there)
    with Publisher(other.conninfo) as publisher:
        publisher.put(there)
        publisher.put([*numbers(3)[1:], Event("t", {"n": 3}, at=datetime.now(UTC) + HOUR)])
    with psycopg.connect(other.conninfo) as limited:
        publish(limited, Event("t", {"n": 4}, at=datetime.now(UTC) + 2 * HOUR))
    assert stored(connection) == list(range(5))


@pytest.mark.parametrize("never", [float("inf"), 1e10, 10**400], ids=["inf", "1e10", "1e400"])
def test_a_buffer_may_wait_for_ever(db, connect, never):
    with Publisher(db, flush_events=2, flush_after=never) as publisher:
        publisher.put(numbers(3))
        assert succeeds(lambda: stored(connect()) == [0, 1], SECONDS)
        publisher.flush(timeout=SECONDS)
        assert stored(connect()) == [0, 1, 2]


@pytest.mark.parametrize("nonsense", [-1, float("nan"), "1", None, True])
def test_a_time_to_wait_that_is_none_is_refused(db, nonsense):
    with pytest.raises(InvalidArgument, match="flush_after"):
        Publisher(db, flush_after=nonsense)


def test_the_memory_is_bounded_and_who_puts_more_is_told(db, connect):
    away = make_conninfo(db, port=1)
    publisher = Publisher(away, memory=10_000, on_full="raise")
    with pytest.raises(PublisherFull, match="server is away|events wait"):
        publisher.put(numbers(100))
    with pytest.raises(NotPublished) as raised:
        publisher.close(timeout=0.1)
    assert [event.payload["n"] for event in raised.value.events] == list(range(len(raised.value.events)))
    assert 1 <= len(raised.value.events) < 10


def test_who_puts_more_than_the_memory_holds_waits(db, connect, monkeypatch):
    blocked, connect_really = threading.Event(), publisher_module.connect

    def later(*arguments, **more):
        blocked.wait(30)
        return connect_really(*arguments, **more)

    monkeypatch.setattr(publisher_module, "connect", later)
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
    with Publisher(limited, flush_events=100) as publisher:
        publisher.put(numbers(100))
        publisher.flush()
    assert stored(connection) == list(range(100))


def test_an_event_larger_than_the_memory_goes_alone(db, connect):
    with Publisher(db, memory=5_000, on_full="raise") as publisher:
        publisher.put(Event("t", {"n": 1, "text": "x" * 50_000}))
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
