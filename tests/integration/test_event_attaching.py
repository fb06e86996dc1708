"""Partitions are attached beside those who publish and read: nobody fails, nobody waits long, and it comes to be."""

from __future__ import annotations

import threading

import psycopg
import pytest

from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from tests.commits import until
from tests.event_keeping import (
    contiguous,
    dispatch,
    kept,
    lines,
    maintain,
    narrow,
    partitions,
    publish,
    subscribe,
)
from tests.tubes import one

DEFAULT = "select count(*) from pgmb.events_default"
WAITING = "select exists (select from pg_locks where locktype = 'relation' and not granted)"
RESTING = "select exists (select from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep')"


@pytest.mark.parametrize("at", ["now()", "now() + interval '5 hours'", "now() - interval '5 hours'"])
def test_a_partition_is_postponed_and_nobody_waits_while_a_publisher_is_at_work(connect, at):
    connection, publisher = connect(), connect(autocommit=False)
    expected = publish(publisher, at=at)
    connection.execute("set statement_timeout = '20s'")
    before = partitions(connection)
    assert any("postponed the partitions of events" in line for line in maintain(connection, "5 hours"))
    assert partitions(connection) == before
    expected += publish(publisher, at=at)
    publisher.commit()
    maintain(connection, "5 hours")
    assert contiguous(connection)
    assert kept(connection) == expected


def test_who_publishes_into_a_partition_that_is_being_attached_does_not_fail(connect, db):
    """Sent to the default partition before, and there after it takes those rows no more: that fails."""
    maintaining = connect(autocommit=False)
    maintain(maintaining, "5 hours")
    published = []

    def work():
        with psycopg.connect(db, autocommit=True) as publisher:
            published.extend(publish(publisher, at="now() + interval '5 hours'"))

    publisher = threading.Thread(target=work)
    publisher.start()
    until(connect(), "select exists (select from pg_locks where mode = 'RowExclusiveLock' and not granted)")
    maintaining.commit()
    publisher.join()
    assert kept(connect()) == published != []
    assert one(connect(), DEFAULT) == 0


@pytest.mark.parametrize("count", [10, 300])
def test_who_reads_a_batch_while_a_partition_is_attached_reads_all_of_it(connect, db, count):
    """The query was planned with the partitions of before, and sees the rows as they are after."""
    connection, maintaining = connect(), connect(autocommit=False)
    for name, _, _ in partitions(connection):
        connection.execute(f"drop table {name}")
    subscribe(connection)
    expected = publish(connection, count)
    dispatch(connection)
    with ConsumerTransaction(EventFeed("g"), db) as consumer:
        consumer.claim(1000)
        assert lines(maintaining, "select pgmb.make_partitions('pgmb.events')")
        found = []
        reader = threading.Thread(target=lambda: found.extend(change.id for change in consumer.changes()))
        reader.start()
        until(connection, WAITING)
        maintaining.commit()
        reader.join()
        assert found == expected
        consumer.ack()


def test_a_reader_of_what_is_there_does_not_wait_for_maintenance_under_way(connect):
    connection, maintaining = connect(), connect(autocommit=False)
    expected = publish(connection)
    lines(maintaining, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    connection.execute("set lock_timeout = '1s'")
    query = "select id from pgmb.events where id = %s"
    assert [row[0] for row in connection.execute(query, expected).fetchall()] == expected


def test_publishers_lose_nothing_while_partitions_come_and_go(connect, db):
    connection = connect()
    narrow(connection)
    published, stop = [], threading.Event()

    def work():
        with psycopg.connect(db, autocommit=True) as publisher:
            publisher.execute("set lock_timeout = '5s'")
            while not stop.is_set():
                published.extend(publish(publisher, 3))
                published.extend(publish(publisher, 1, at="now() + interval '3 seconds'"))

    writers = [threading.Thread(target=work) for _ in range(2)]
    for writer in writers:
        writer.start()
    told = []
    while sum("added" in line for line in told) < 4:
        for step in ("make_partitions", "trim_partitions", "drop_emptied"):
            told += lines(connection, f"select pgmb.{step}('pgmb.events')")
    stop.set()
    for writer in writers:
        writer.join()
    assert kept(connection) == sorted(published)


def test_two_maintenances_at_once_do_not_disturb_each_other(connect, db):
    failures = []

    def work():
        try:
            with psycopg.connect(db, autocommit=True) as connection:
                for hours in range(1, 5):
                    maintain(connection, f"{hours} hours")
        except psycopg.Error as error:
            failures.append(error)

    both = [threading.Thread(target=work) for _ in range(2)]
    for one_of_them in both:
        one_of_them.start()
    for one_of_them in both:
        one_of_them.join()
    assert failures == []
    assert contiguous(connect())


@pytest.mark.parametrize("at", ["now()", "now() + interval '5 hours'"])
def test_a_partition_is_tried_again_when_a_publisher_has_ended(connect, db, at):
    publisher, watching = connect(autocommit=False), connect()
    expected = publish(publisher, at=at)
    told = []

    def work():
        with psycopg.connect(db, autocommit=True) as maintaining:
            told.extend(
                lines(maintaining, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
            )

    maintaining = threading.Thread(target=work)
    maintaining.start()
    until(watching, WAITING)
    until(watching, RESTING)
    expected += publish(watching, at=at)
    publisher.commit()
    maintaining.join()
    assert told
    assert all("added" in line for line in told)
    assert contiguous(watching)
    assert kept(watching) == sorted(expected)


def test_who_holds_locks_does_not_rest(connect, db):
    """Everybody would wait for them meanwhile. Here the publisher is in the way until somebody rests."""
    publisher, maintaining = connect(autocommit=False), connect(autocommit=False)
    publish(publisher)
    made = threading.Event()

    def end_with_the_rest():
        with psycopg.connect(db, autocommit=True) as watching:
            while not made.is_set():
                if one(watching, RESTING):
                    publisher.commit()
                    return

    watching = threading.Thread(target=end_with_the_rest)
    watching.start()
    told = []
    for table in ("dispatched", "events"):
        told += lines(maintaining, f"select pgmb.make_partitions('pgmb.{table}', now() + interval '5 hours')")
    made.set()
    watching.join()
    assert any("added pgmb.dispatched" in line for line in told)
    assert "postponed the partitions of events" in told[-1]


@pytest.mark.parametrize("step", ["make_partitions", "trim_partitions", "drop_emptied"])
def test_a_second_maintenance_steps_aside_while_another_is_at_work(connect, step):
    first, second = connect(autocommit=False), connect()
    before = partitions(second)
    lines(first, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    second.execute("set lock_timeout = '10s'")
    (told,) = lines(second, f"select pgmb.{step}('pgmb.events', now() + interval '5 hours')")
    assert "another maintenance is at work" in told
    first.commit()
    maintain(second, "5 hours")
    assert len(partitions(second)) > len(before)
    assert contiguous(second)


def test_no_partition_is_made_while_publishers_wait_for_another_to_be_attached(connect):
    connection = connect()
    connection.execute(
        "create table public.made (locked boolean);"
        "create function public.note() returns event_trigger language plpgsql as $$ begin "
        "insert into public.made select exists (select from pg_locks where pid = pg_backend_pid() "
        "and relation = 'pgmb.events'::regclass and mode = 'ShareRowExclusiveLock'); end $$;"
        "create event trigger note on ddl_command_end when tag in ('CREATE TABLE') execute function public.note()"
    )
    told = lines(connection, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    made = [row[0] for row in connection.execute("select locked from public.made").fetchall()]
    assert len(made) == len(told) > 1
    assert not any(made)


def test_of_partitions_that_cannot_be_attached_nothing_is_left(connect):
    connection, publisher = connect(), connect(autocommit=False)
    tables = "select count(*) from pg_class where relnamespace = 'pgmb'::regnamespace"
    before = one(connection, tables)
    publish(publisher)
    (told,) = lines(connection, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    assert "it is being written" in told
    assert one(connection, tables) == before
