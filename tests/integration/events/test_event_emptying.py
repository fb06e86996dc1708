"""Old partitions are emptied and dropped while others write and read: nobody waits, and nothing is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_pgchange.admin.maintenance import maintain as look_after
from tests.event_keeping import dispatch, kept, lines, maintain, narrow, partitions, publish, read, subscribe
from tests.limits import be_patient
from tests.tubes import one
from tests.waiting import until, waits

LATER = "5 hours"
OLD = "timestamptz '2020-01-01 00:00+00'"
TRIM = f"select pgmb.trim_partitions('pgmb.events', now() + interval '{LATER}')"


@pytest.fixture
def log(connect):
    """A log with a group that reads everything."""
    connection = connect()
    subscribe(connection)
    return connection


def test_an_event_written_while_the_partition_is_about_to_go_stays(log, connect):
    # Events of one moment, and so of one partition.
    now = f"'{one(log, 'select now()')}'"
    ids = publish(log, at=now)
    dispatch(log)
    read(log)
    publisher = connect(autocommit=False)
    late = publish(publisher, at=now)
    log.execute("set statement_timeout = '20s'")
    assert any("it is in use" in line for line in maintain(log, LATER))
    publisher.commit()
    assert any("not all in it is dispatched" in line for line in maintain(log, LATER))
    assert kept(log) == [*ids, *late]
    dispatch(log)
    assert read(log) == late


@pytest.mark.parametrize("at", [None, "clock_timestamp() + interval '1 second'"], ids=["now", "for later"])
def test_an_event_that_is_committed_while_retention_waits_for_its_partition_stays(log, connect, db, at):
    ids = publish(log)
    dispatch(log)
    read(log)
    be_patient(log)
    publisher, told = connect(autocommit=False), []
    late = publish(publisher, at=at)

    def work():
        with psycopg.connect(db, autocommit=True) as trimming:
            told.extend(lines(trimming, TRIM))

    trimming = threading.Thread(target=work)
    trimming.start()
    until(log, waits(kind="relation"))
    publisher.commit()
    trimming.join()
    assert any("not all in it is dispatched" in line for line in told)
    assert kept(log) == [*ids, *late]


def test_an_event_that_is_committed_while_retention_looks_for_holders_stays(log, connect):
    ids = publish(log)
    dispatch(log)
    read(log)
    holding = connect(autocommit=False)
    holding.execute("lock table pgmb.fault in access exclusive mode")
    with ThreadPoolExecutor() as threads:
        told = threads.submit(lines, connect(), TRIM)
        until(log, waits(behind=holding))
        late = publish(log)
        holding.rollback()
        assert any("not all in it is dispatched" in line for line in told.result())
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
    # An event of another partition than that which is locked.
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


def test_a_partition_that_is_written_while_a_drop_waits_for_the_writer_stays(log, connect):
    be_patient(log)
    writer = connect(autocommit=False)
    ids = publish(writer)
    with ThreadPoolExecutor() as threads:
        drop = "select pgmb.drop_emptied('pgmb.events', now() + interval '9 hours', 0)"
        dropped = threads.submit(lines, connect(), drop)
        until(log, waits(behind=writer))
        writer.commit()
        dropped.result()
    assert kept(log) == ids


def test_a_partition_that_holds_something_is_not_dropped(log):
    publish(log)
    lines(log, "select pgmb.drop_emptied('pgmb.events', now() + interval '9 hours', 0)")
    assert len(partitions(log)) == 1
    assert len(kept(log)) == 1


@pytest.mark.parametrize(
    "times", [2, pytest.param(8, marks=pytest.mark.release("more of the same, for longer"))]
)
def test_everything_is_read_once_while_partitions_come_and_go(log, db, times):
    """Run publishers, the dispatcher and a reader, with partitions of a second that are kept for one more second. The
    test takes as long as some partitions live."""
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
                stop.wait(0.01)

    def consume():
        with psycopg.connect(db, autocommit=True) as consumer:
            while not stop.is_set():
                dispatch(consumer)
                got.extend(read(consumer))
                stop.wait(0.02)

    threads = [threading.Thread(target=write), threading.Thread(target=consume)]
    for thread in threads:
        thread.start()
    told = []
    aside = 0
    while not aside or any(sum(word in line for line in told) < times for word in ("emptied", "dropped")):
        aside += one(log, "select pgmb.place_scheduled()")
        for table in ("events", "dispatched"):
            told += lines(log, f"select pgmb.make_partitions('pgmb.{table}')")
            told += lines(log, f"select pgmb.trim_partitions('pgmb.{table}')")
            told += lines(log, f"select pgmb.drop_emptied('pgmb.{table}', spare => 0)")
        stop.wait(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    # Continue for up to four seconds, until the last of them are due.
    while one(log, "select exists (select from pgmb.unread_events)"):
        dispatch(log)
        log.execute("select pg_sleep(0.1)")
    dispatch(log)
    got.extend(read(log))
    assert aside > 0
    assert sorted(got) == sorted(published)


@pytest.fixture
def many(log):
    """Create 40 old partitions, each with an event that every group has read."""
    narrow(log)
    for statement in lines(
        log,
        "select format('create table pgmb.events_old_%s partition of pgmb.events for values from (%L) to (%L)', n, "
        "pgmb.create_event_id(t, 0), pgmb.create_event_id(t + interval '1 minute', 0)) "
        "from generate_series(1, 40) as n cross join lateral ("
        f"select {OLD} + n * interval '1 minute') as o(t)",
    ):
        log.execute(statement)
    for n in range(1, 41):
        publish(log, at=f"{OLD} + interval '{n} minutes 1 second'")
    dispatch(log)
    assert len(read(log)) == 40
    return log


def test_of_many_old_partitions_a_few_are_emptied_in_a_transaction_and_the_rest_in_others(many):
    told = lines(many, "select pgmb.trim_partitions('pgmb.events')")
    emptied = [line for line in told if line.startswith("emptied")]
    assert 1 <= len(emptied) <= 16
    assert told[-1] == f"left {40 - len(emptied)} old partitions of events to the next time"
    report = look_after(many)
    assert len([line for line in report.done if line.startswith("emptied events_old_")]) == 40 - len(emptied)
    assert not any(line.startswith("left") for line in report.done)
    assert kept(many) == []


def test_old_partitions_that_are_in_use_keep_no_other_from_being_emptied(many, connect):
    reader = connect(autocommit=False)
    for n in range(1, 21):
        reader.execute(f"select from pgmb.events_old_{n}")
    report = look_after(many)
    assert len([line for line in report.done if line.startswith("emptied events_old_")]) == 20
    assert len([line for line in report.done if line.startswith("postponed events_old_")]) == 20
    reader.rollback()
    look_after(many)
    assert kept(many) == []


def test_undispatched_events_are_read_once_for_all_old_partitions(many):
    for _ in range(1000):
        publish(many)
    (held,) = publish(many, at=f"{OLD} + interval '20 minutes 2 seconds'")
    with many.transaction():
        many.execute("set local enable_seqscan = off")
        told = lines(many, "select pgmb.trim_partitions('pgmb.events')")
        gone_through = one(
            many,
            "select sum(pg_stat_get_xact_tuples_returned(c.oid)) from pg_class as c where c.relname ~ '^published_'",
        )
    assert "kept events_old_20: not all in it is dispatched" in told
    assert gone_through < 5000
    look_after(many)
    assert held in kept(many)


def test_unread_events_of_a_group_are_read_once_for_all_old_partitions(many):
    """Events that were dispatched long after their time, so that no dispatch lies in the time range of their
    partition."""
    for n in range(40, 0, -2):
        publish(many, at=f"{OLD} + interval '{n} minutes 2 seconds'")
        dispatch(many)
    read = (
        "select sum(pg_stat_get_xact_tuples_returned(x.indexrelid)) "
        "from pg_inherits as i join pg_index as x on x.indrelid = i.inhrelid "
        "where i.inhparent = 'pgmb.dispatched'::regclass"
    )
    with many.transaction():
        before = one(many, read)
        told = lines(many, "select reason from pgmb.overdue()")
        fetched = one(many, read) - before
    assert told == ["group g has not read it"] * 20
    assert fetched <= 100
