"""Partitions are attached while others publish and read: nothing fails, nobody waits long, and each partition is attached
in the end."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from tests.event_keeping import (
    contiguous,
    dispatch,
    fill_default,
    kept,
    lines,
    maintain,
    narrow,
    partitions,
    place,
    publish,
    subscribe,
)
from tests.limits import shorten_rests
from tests.tubes import one
from tests.waiting import until, waits

DEFAULT = "select count(*) from pgmb.events_default"


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


def test_a_reader_that_keeps_partitions_from_being_attached_is_named(connect):
    connection, dump = connect(), connect(autocommit=False)
    dump.execute("lock table pgmb.events in access share mode")
    reader = dump.info.backend_pid
    shorten_rests(connection)
    assert connection.execute(
        "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')"
    ).fetchall() == [(f"postponed the partitions of events: it is in use, just now by process {reader}",)]
    dump.rollback()
    assert "added" in one(
        connection, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours') limit 1"
    )


def test_a_publisher_does_not_fail_while_its_partition_is_attached(connect, db):
    """The row is routed to the default partition before the attachment, and inserted after it. The default partition no
    longer accepts it, so the statement fails."""
    maintaining = connect(autocommit=False)
    maintain(maintaining, "5 hours")
    published = []

    def work():
        with psycopg.connect(db, autocommit=True) as publisher:
            published.extend(publish(publisher, at="now() + interval '5 hours'"))

    publisher = threading.Thread(target=work)
    publisher.start()
    until(connect(), waits(kind="relation"))
    maintaining.commit()
    publisher.join()
    assert kept(connect()) == published != []
    assert one(connect(), DEFAULT) == 0


@pytest.mark.parametrize("count", [10, 300])
def test_a_batch_is_read_completely_while_a_partition_is_attached(connect, db, count):
    """The query was planned before the attachment, and reads the rows after it."""
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
        until(connection, waits(kind="relation"))
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
    """Takes seconds: the test lasts until some partitions of one second have been created and dropped."""
    connection = connect()
    narrow(connection)
    published, stop = [], threading.Event()

    def work():
        with psycopg.connect(db, autocommit=True) as publisher:
            publisher.execute("set lock_timeout = '5s'")
            while not stop.is_set():
                published.extend(publish(publisher, 3))
                published.extend(publish(publisher, 1, at="now() + interval '3 seconds'"))
                stop.wait(0.005)

    writers = [threading.Thread(target=work) for _ in range(2)]
    for writer in writers:
        writer.start()
    told, deadline = [], time.monotonic() + 120
    try:
        while sum("added" in line for line in told) < 3:
            assert time.monotonic() < deadline, set(told)
            for step in ("make_partitions", "trim_partitions", "drop_emptied"):
                told += lines(connection, f"select pgmb.{step}('pgmb.events')")
            stop.wait(0.02)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert kept(connection) == sorted(published)


def test_publishers_of_what_is_to_come_keep_no_partition_from_being_attached(connect, db):
    stop, published = threading.Event(), []

    def work():
        with psycopg.connect(db, autocommit=True) as publisher:
            while not stop.is_set():
                published.extend(publish(publisher, 5, at="now() + interval '5 hours'"))

    publishers = [threading.Thread(target=work) for _ in range(2)]
    for publisher in publishers:
        publisher.start()
    connection = connect()
    until(connection, DEFAULT.replace("count(*)", "count(*) > 0"))
    told = lines(connection, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    stop.set()
    for publisher in publishers:
        publisher.join()
    assert told
    assert all("added" in line for line in told)
    place(connection)
    assert one(connection, DEFAULT) == 0
    assert kept(connection) == sorted(published)


def test_publishers_of_what_is_to_come_keep_no_default_partition_from_giving_back_its_room(connect, db):
    """If it stays large, no partition is created until a person permits stopping publishers."""
    connection, stop = connect(), threading.Event()
    fill_default(connection, 3000, "now() + interval '5 hours'")

    def work():
        with psycopg.connect(db, autocommit=True) as publisher:
            while not stop.is_set():
                publish(publisher, 5, at="now() + interval '5 hours'")

    publisher = threading.Thread(target=work)
    publisher.start()
    until(connection, "select count(*) > 3100 from pgmb.events_default")
    # Some of these steps wait for a publisher in vain, and are postponed. So repeat them.
    for _ in range(10):
        told = [
            line
            for step in (
                "place_scheduled(",
                "trim_partitions('pgmb.events', ",
                "make_partitions('pgmb.events', ",
            )
            for line in lines(connection, f"select pgmb.{step}now() + interval '5 hours')::text")
        ]
        if any("added" in line for line in told):
            break
    stop.set()
    publisher.join()
    assert any("added" in line for line in told)


def test_a_poll_without_work_does_not_wait_for_maintenance(connect):
    connection, maintaining = connect(), connect(autocommit=False)
    assert lines(maintaining, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    connection.execute("set lock_timeout = '1s'")
    assert one(connection, "select pgmb.poll_for_events()") == 0
