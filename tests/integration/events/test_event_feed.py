"""The feed of a group in the consumer transaction: the events that it gets, and the progress that is kept."""

from __future__ import annotations

import math
import threading

import psycopg
import pytest

from airflow_pgchange.admin import manual_operations
from airflow_pgchange.errors import (
    HistoryTrimmed,
    InvalidArgument,
    ServerUnavailable,
    SourceLostTail,
    SourceRestored,
    UnknownConsumer,
)
from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.feed_kinds import from_json, from_uri, to_json, to_uri
from tests.event_keeping import maintain, narrow
from tests.events import (
    FEED,
    claim,
    poll_all,
    position,
    publish,
    read,
    subscribe,
    work,
    work_all,
)
from tests.tubes import one
from tests.waiting import locks

pytestmark = pytest.mark.usefixtures("few_sessions")


def test_an_event_feed_keeps_the_contract():
    assert isinstance(FEED, Feed)
    assert from_json(to_json(FEED)) == FEED
    assert from_uri(to_uri(FEED, "airline")) == (FEED, "airline")


@pytest.mark.parametrize("group", ["", 7, "g" * 49])
def test_a_group_that_cannot_be_is_refused(group):
    with pytest.raises(InvalidArgument):
        EventFeed(group)


def test_an_unknown_group_is_named(db):
    with pytest.raises(UnknownConsumer, match="nosuch"), ConsumerTransaction(EventFeed("nosuch"), db):
        pass


def test_a_number_that_python_cannot_read_stops_no_consumer(db, connect):
    connection = connect()
    subscribe(connection)
    connection.execute("insert into pgmb.events (topic, payload) values ('t', '[1e5000, -1e5000, 7]')")
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        assert [change.data["payload"] for change in consumer.changes()] == [[math.inf, -math.inf, 7]]
        consumer.ack()


def test_results_and_the_cursor_are_kept_together_or_not_at_all(db, connect):
    connection = connect()
    connection.execute("create table copied (id text)")
    subscribe(connection)
    ids = publish(connection, "a", "b")

    def write(results):
        results.execute("insert into copied select id from pgmb.events")

    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(100)
        consumer.ack(write)
        raise ZeroDivisionError
    assert one(connection, "select count(*) from copied") == 0
    assert work(db, write=write) == ids
    assert one(connection, "select count(*) from copied") == 2
    assert work(db) == []


def test_results_elsewhere_come_exactly_once_with_their_cursor(db, other_db, connect_to):
    results, source = connect_to(db), connect_to(other_db)
    results.execute("create table copied (id text)")
    subscribe(source)
    subscribe(source, "behind")
    ids = publish(source, *"abcde")

    def write(connection):
        connection.execute("insert into copied select 'x' from generate_series(1, 2)")

    with pytest.raises(ServerUnavailable), ConsumerTransaction(FEED, db, other_db) as consumer:
        consumer.claim(2)
        consumer.ack(write)
        results.execute("select pg_terminate_backend(%s)", [consumer.connection.info.backend_pid])
    assert one(results, "select count(*) from copied") == 0
    assert work(db, source=other_db, limit=2, write=write) == ids[:2]
    assert work_all(db, source=other_db) == ids[2:]
    assert position(source)["cursor"] == ""
    cursors = dict(source.execute("select group_id, cursor from pgmb.cursors()").fetchall())
    assert cursors.keys() == {"g", "behind"}
    assert cursors["g"] > ids[2] > cursors["behind"] == ""


def test_a_crash_with_writers_at_work_loses_and_doubles_nothing(own_cluster, own_database):
    """Takes seconds: a server with writers at work crashes and recovers."""
    with psycopg.connect(own_database, autocommit=True) as connection:
        connection.execute("create table copied (id text)")
        subscribe(connection)
    committed = []

    def write(writer_number):
        with psycopg.connect(own_database, autocommit=True) as writer:
            try:
                for _ in range(10_000):
                    committed.extend(publish(writer, *["t"] * 7))
            except psycopg.OperationalError:
                return

    def copy_to(consumer):
        ids = [change.id for change in consumer.changes()]
        consumer.ack(lambda c: c.execute("insert into copied select unnest(%s::text[])", [ids]))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    for _ in range(8):
        with ConsumerTransaction(FEED, own_database) as consumer:
            if consumer.claim(200):
                copy_to(consumer)
    own_cluster.stop("immediate")
    for writer in writers:
        writer.join()
    own_cluster.start()
    while True:
        with ConsumerTransaction(FEED, own_database) as consumer:
            if not consumer.claim(5000):
                break
            copy_to(consumer)
    with psycopg.connect(own_database, autocommit=True) as connection:
        copied = [row[0] for row in connection.execute("select id from copied").fetchall()]
        there = {row[0] for row in connection.execute("select id from pgmb.events").fetchall()}
    assert len(copied) == len(set(copied))
    assert set(copied) == there
    assert set() < set(committed) <= there


def test_while_a_batch_is_in_work_no_snapshot_is_open(db, connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(100)
        list(consumer.changes())
        consumer.ping()
        working = one(
            connection,
            "select count(*) from pg_stat_activity where application_name = 'airflow_pgchange' "
            "and datname = current_database() and (backend_xid is not null or backend_xmin is not null)",
        )
        kinds = [lock.kind for lock in locks(connection, consumer.connection)]
        consumer.ack()
    assert (working, kinds.count("relation")) == (0, 0)


def test_a_retry_is_the_same_batch_whatever_was_published_meanwhile(db, connect):
    connection, late = connect(), connect(autocommit=False)
    subscribe(connection)
    publish(late, "late")
    ids = publish(connection, "a", "b")
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        first = consumer.claim(100)
        raise ZeroDivisionError
    late.commit()
    publish(connection, "c")
    poll_all(connection)
    with ConsumerTransaction(FEED, db) as consumer:
        again = consumer.claim(100)
        assert (again.id, again.attempt) == (first.id, 2)
        assert [change.id for change in consumer.changes()] == ids
        consumer.ack()


def test_the_session_that_reads_by_hand_and_the_feed_exclude_each_other(db, connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    read(connection, peek=False)
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.busy
    connection.execute("select pgmb.release_group_lock('g')")
    with ConsumerTransaction(FEED, db) as consumer:
        assert not consumer.busy
        assert read(connection, peek=False) == []


def test_a_group_that_was_moved_after_a_failure_gets_no_batch_from_before_that(db, connect):
    connection = connect()
    subscribe(connection)
    publish(connection, *"ab")
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(100)
        raise ZeroDivisionError
    manual_operations.move_consumer(connection, connection, FEED, "now")
    assert work(db) == []
    later = publish(connection, "c")
    assert work(db) == later


def test_a_source_that_lost_its_tail_is_told_and_repaired(db, other_db, connect_to):
    results, source = connect_to(db), connect_to(other_db)
    subscribe(source)
    publish(source, *"abc")
    work(db, source=other_db, limit=1)
    work(db, source=other_db, limit=1)
    source.execute("""update pgchange.claim set version = 1, from_version = 0, upto = after, after = '""'""")
    with pytest.raises(SourceLostTail, match="airflow-pgchange repair events:g"):
        lag(results, source, FEED)
    mark = one(source, "select pgmb.mark('g')")
    assert one(results, "select pgmb.adopt_mark('g', %s)", psycopg.types.json.Jsonb(mark)) == "at least once"
    assert len(work_all(db, source=other_db)) == 2


def test_results_that_were_restored_to_before_what_the_log_still_has_are_told_and_moved(
    db, other_db, connect_to
):
    results, source = connect_to(db), connect_to(other_db)
    narrow(source)
    maintain(source)
    subscribe(source)
    publish(source, "a")
    work(db, source=other_db)
    before = results.execute("select version, last_read_event_id from pgmb.subscription_groups").fetchone()
    publish(source, "b")
    work(db, source=other_db)
    dispatched = "pgmb.extract_date_from_event_id((pgmb.dispatcher_now()).last_id)"
    source.execute(f"select pg_sleep_until({dispatched} + interval '1 second')")
    later = publish(source, "c")
    work(db, source=other_db)
    results.execute("update pgmb.subscription_groups set (version, last_read_event_id) = (%s, %s)", before)
    assert lag(results, source, FEED).ready == 2
    maintain(source, "1 hour")
    with pytest.raises(HistoryTrimmed, match="--to beginning"):
        work(db, source=other_db)
    manual_operations.move_consumer(results, source, FEED, "beginning")
    assert work(db, source=other_db) == later


def test_results_that_were_restored_to_a_time_that_they_were_moved_to_go_on_from_there(
    db, other_db, connect_to
):
    results, source = connect_to(db), connect_to(other_db)
    subscribe(source)
    publish(source, "a")
    work(db, source=other_db)
    manual_operations.move_consumer(results, source, FEED, "now")
    before = results.execute("select version, last_read_event_id from pgmb.subscription_groups").fetchone()
    again = publish(source, "b", "c")
    assert work(db, source=other_db, limit=1) + work(db, source=other_db, limit=1) == again
    results.execute("update pgmb.subscription_groups set (version, last_read_event_id) = (%s, %s)", before)
    assert work(db, source=other_db) == again


def test_another_source_than_the_cursors_is_told(db, other_db, connect_to):
    results, source = connect_to(db), connect_to(other_db)
    subscribe(source)
    publish(source, "a")
    work(db, source=other_db)
    results.execute("update pgmb.subscription_groups set source = 'elsewhere'")
    with pytest.raises(SourceRestored, match="another database"):
        lag(results, source, FEED)


def test_status_tells_of_every_group(db, connect):
    connection = connect()
    subscribe(connection)
    publish(connection, *"ab")
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        shown = connection.execute(
            "select consumer, ready, at_work, attempt, batch_id::text from pgmb.status()"
        ).fetchone()
        assert shown == ("events:g", 2, True, 1, consumer.batch.id)
        consumer.ack()
    shown = connection.execute("select ready, at_work, batch_id from pgmb.status()").fetchone()
    assert shown == (1, False, None)


def test_a_dropped_group_is_forgotten(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    claim(connection)
    connection.execute("select pgmb.drop_consumer('g')")
    for table in ("subscription_groups", "subscriptions", "claims", "fault"):
        assert one(connection, f"select count(*) from pgmb.{table}") == 0


def test_a_claim_that_could_not_dispatch_says_so_instead_of_finding_nothing(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    connection.execute("set default_transaction_isolation = 'repeatable read'")
    with pytest.raises(psycopg.Error, match="read committed") as refused:
        claim(connection)
    assert refused.value.sqlstate == "PC007"
