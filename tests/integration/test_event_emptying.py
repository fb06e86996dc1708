"""Old partitions are emptied and dropped beside those who write and read: nobody waits, and nothing is lost."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.commits import until
from tests.event_keeping import dispatch, kept, lines, maintain, narrow, partitions, publish, read, subscribe
from tests.tubes import one

LATER = "5 hours"
TRIM = f"select pgmb.trim_partitions('pgmb.events', now() + interval '{LATER}')"


@pytest.fixture
def log(connect):
    """A log with a group that reads everything."""
    connection = connect()
    subscribe(connection)
    return connection


def test_an_event_written_while_the_partition_is_about_to_go_stays(log, connect):
    ids = publish(log)
    dispatch(log)
    read(log)
    publisher = connect(autocommit=False)
    late = publish(publisher, at="clock_timestamp()")
    log.execute("set statement_timeout = '20s'")
    assert any("it is in use" in line for line in maintain(log, LATER))
    publisher.commit()
    assert any("not all in it is dispatched" in line for line in maintain(log, LATER))
    assert kept(log) == [*ids, *late]
    dispatch(log)
    assert read(log) == late


def test_an_event_that_is_committed_while_retention_waits_for_its_partition_stays(log, connect, db):
    ids = publish(log)
    dispatch(log)
    read(log)
    log.execute(
        "alter function pgmb.trim_partition(regclass, regclass, pgmb.event_id, pgmb.event_id) "
        "set lock_timeout = '60s'"
    )
    publisher, told = connect(autocommit=False), []
    late = publish(publisher)

    def work():
        with psycopg.connect(db, autocommit=True) as trimming:
            told.extend(lines(trimming, TRIM))

    trimming = threading.Thread(target=work)
    trimming.start()
    until(log, "select exists (select from pg_locks where locktype = 'relation' and not granted)")
    publisher.commit()
    trimming.join()
    assert any("not all in it is dispatched" in line for line in told)
    assert kept(log) == [*ids, *late]


def test_retention_does_not_wait_for_a_long_reader_and_nobody_for_retention(log, connect):
    publish(log)
    dispatch(log)
    read(log)
    reader = connect(autocommit=False)
    reader.execute("select from pgmb.events").fetchall()
    log.execute("set statement_timeout = '20s'")
    assert any("postponed" in line and "it is in use" in line for line in maintain(log, LATER))
    reader.rollback()
    assert any("emptied" in line for line in maintain(log, LATER))


def test_a_publisher_does_not_wait_while_old_partitions_are_emptied(log, connect):
    publish(log)
    dispatch(log)
    read(log)
    maintain(log, LATER)
    trimming, publisher = connect(autocommit=False), connect()
    publish(log)
    dispatch(log)
    read(log)
    # Of another partition than the one that is locked.
    later = one(log, "select now() + interval '4 hours'")
    told = lines(trimming, f"select pgmb.trim_partitions('pgmb.events', '{later + (later - later)}')")
    publisher.execute("set lock_timeout = '1s'")
    publish(publisher, at="now() + interval '3 hours'")
    trimming.commit()
    assert any("emptied" in line for line in told)


def test_emptied_partitions_are_dropped_when_there_are_many(log):
    for hours in range(1, 9):
        lines(log, f"select pgmb.make_partitions('pgmb.events', now() + interval '{hours} hours')")
    before = partitions(log)
    told = lines(log, "select pgmb.drop_emptied('pgmb.events', now() + interval '9 hours', 8)")
    assert len(told) > 8
    assert len(partitions(log)) == len(before) - len(told)
    ids = publish(log, 2)
    dispatch(log)
    assert read(log) == ids


def test_emptied_partitions_stay_while_somebody_writes(log, connect):
    writer = connect(autocommit=False)
    ids = publish(writer)
    log.execute("set statement_timeout = '20s'")
    before = partitions(log)
    told = lines(log, "select pgmb.drop_emptied('pgmb.events', now() + interval '9 hours', 0)")
    assert told == ["postponed dropping empty partitions of events: it is in use"]
    assert partitions(log) == before
    writer.commit()
    dispatch(log)
    assert read(log) == ids


def test_a_partition_that_holds_something_is_not_dropped(log):
    publish(log)
    lines(log, "select pgmb.drop_emptied('pgmb.events', now() + interval '9 hours', 0)")
    assert len(partitions(log)) == 1
    assert len(kept(log)) == 1


def test_everything_is_read_once_while_partitions_come_and_go(log, db):
    """Publishers, the dispatcher and a reader at work, with partitions of a second that live for one more."""
    narrow(log)
    published, got, stop = [], [], threading.Event()

    def write():
        with psycopg.connect(db, autocommit=True) as publisher:
            while not stop.is_set():
                if len(published) - len(got) > 100:
                    stop.wait(0.01)
                    continue
                published.extend(publish(publisher, 3))
                published.extend(publish(publisher, at="now() + interval '300 ms'"))
                published.extend(publish(publisher, at="now() + interval '4 seconds'"))
                published.extend(publish(publisher, at="now() - interval '1 hour'"))

    def consume():
        with psycopg.connect(db, autocommit=True) as consumer:
            while not stop.is_set():
                dispatch(consumer)
                got.extend(read(consumer))

    threads = [threading.Thread(target=write), threading.Thread(target=consume)]
    for thread in threads:
        thread.start()
    told = []
    aside = 0
    while sum("emptied" in line for line in told) < 4 or sum("dropped" in line for line in told) < 4:
        aside += one(log, "select pgmb.place_scheduled()")
        for table in ("events", "dispatched"):
            told += lines(log, f"select pgmb.make_partitions('pgmb.{table}')")
            told += lines(log, f"select pgmb.trim_partitions('pgmb.{table}')")
            told += lines(log, f"select pgmb.drop_emptied('pgmb.{table}', spare => 0)")
    stop.set()
    for thread in threads:
        thread.join()
    while one(log, "select exists (select from pgmb.unread_events)"):
        dispatch(log)
    dispatch(log)
    got.extend(read(log))
    assert aside > 0
    assert sorted(got) == sorted(published)
