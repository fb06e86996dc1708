"""Partitions are attached beside those who publish and read: nobody fails, nobody waits long, and it comes to be."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from airflow_pgchange.maintenance import maintain as look_after
from tests.event_keeping import (
    configure,
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
from tests.waiting import sleeps, until, waits

DEFAULT = "select count(*) from pgmb.events_default"


@pytest.fixture
def attaching(db):
    """Make partitions of events in a thread of its own; the future of what that says."""
    with ThreadPoolExecutor() as threads:

        def make(arguments):
            with psycopg.connect(db, autocommit=True) as connection:
                return lines(connection, f"select pgmb.make_partitions('pgmb.events', {arguments})")

        yield functools.partial(threads.submit, make)


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


def test_who_reads_all_of_the_log_and_keeps_it_from_having_partitions_is_said(connect):
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
    until(connect(), waits(kind="relation"))
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
    """It takes as long as some partitions of a second live."""
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
def test_a_partition_is_tried_again_when_a_publisher_has_ended(connect, attaching, at):
    publisher, watching = connect(autocommit=False), connect()
    expected = publish(publisher, at=at)
    told = attaching("now() + interval '5 hours'")
    # It rests when it has waited in vain.
    until(watching, sleeps())
    expected += publish(watching, at=at)
    publisher.commit()
    assert told.result()
    assert all("added" in line for line in told.result())
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
                if one(watching, sleeps()):
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


@pytest.mark.parametrize("shorter", [False, True])
def test_no_partition_is_made_while_publishers_wait_for_another_to_be_attached(connect, shorter):
    connection = connect()
    if shorter:
        configure(connection, partition_interval="2 hours", partition_retention_period="2 hours")
        maintain(connection, "5 hours")
        configure(connection, partition_interval="1 hour")
    connection.execute(
        "create table public.made (locked boolean);"
        "create function public.note() returns event_trigger language plpgsql as $$ begin "
        "insert into public.made select exists (select from pg_locks where pid = pg_backend_pid() "
        "and relation = 'pgmb.events'::regclass and mode in ('ShareRowExclusiveLock', 'AccessExclusiveLock'));"
        "end $$;"
        "create event trigger note on ddl_command_end when tag in ('CREATE TABLE') execute function public.note()"
    )
    told = lines(connection, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    made = [row[0] for row in connection.execute("select locked from public.made").fetchall()]
    assert any("dropped" in line for line in told) == shorter
    assert len(made) == sum("added" in line for line in told) > 1
    assert not any(made)
    assert contiguous(connection)


def test_what_waits_for_its_time_is_moved_while_nobody_waits_for_that(connect):
    connection = connect()
    expected = publish(connection, 2000, at="now() + interval '5 hours'")
    connection.execute(
        "create table public.moved (locked boolean);"
        "create function public.note() returns trigger language plpgsql as $$ begin "
        "insert into public.moved select exists (select from pg_locks where pid = pg_backend_pid() "
        "and relation = 'pgmb.events_default'::regclass and mode = 'AccessExclusiveLock'); return null; end $$;"
        "create trigger note after delete on pgmb.events_default for each row execute function public.note()"
    )
    told = lines(connection, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    assert any("added" in line for line in told)
    moved = [row[0] for row in connection.execute("select locked from public.moved").fetchall()]
    assert len(moved) == 2000
    assert not any(moved)
    assert kept(connection) == expected


def test_who_waits_to_attach_has_nothing_locked_that_a_publisher_needs(connect, attaching):
    """Else that publisher would wait for it, and it for the publisher."""
    publisher, watching = connect(autocommit=False), connect()
    be_patient(watching)
    publish(publisher)
    told = attaching("now() + interval '5 hours'")
    until(watching, waits(kind="relation"))
    publisher.execute("set lock_timeout = '1s'")
    expected = publish(publisher, at="now() + interval '5 hours'")
    publisher.commit()
    assert any("added" in line for line in told.result())
    assert set(expected) < set(kept(watching))


def be_patient(connection):
    """Attaching waits as long as it takes."""
    (function,) = connection.execute(
        "select oid::regprocedure::text from pg_proc where proname = 'attach_partitions'"
    ).fetchone()
    connection.execute(f"alter function {function} set lock_timeout = '60s'")


def test_publishers_that_may_be_stopped_are_waited_for_and_then_stopped(connect, attaching):
    publisher, watching = connect(autocommit=False), connect()
    expected = publish(publisher)
    told = attaching("now() + interval '5 hours', stop_publishers => true")
    until(watching, waits(behind=publisher, seconds=1))
    publisher.commit()
    assert told.result()
    assert all("added" in line for line in told.result())
    assert kept(watching) == expected


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
    """Where it stays large no partition is made before somebody says that publishers may be stopped."""
    connection, stop = connect(), threading.Event()
    fill_default(connection, 3000, "now() + interval '5 hours'")

    def work():
        with psycopg.connect(db, autocommit=True) as publisher:
            while not stop.is_set():
                publish(publisher, 5, at="now() + interval '5 hours'")

    publisher = threading.Thread(target=work)
    publisher.start()
    until(connection, "select count(*) > 3100 from pgmb.events_default")
    # Some of these may find a publisher at work for longer than they wait.
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


def test_who_has_nothing_to_dispatch_does_not_wait_for_maintenance_under_way(connect):
    connection, maintaining = connect(), connect(autocommit=False)
    assert lines(maintaining, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    connection.execute("set lock_timeout = '1s'")
    assert one(connection, "select pgmb.poll_for_events()") == 0


def test_of_partitions_that_cannot_be_attached_nothing_is_left(connect):
    connection, publisher = connect(), connect(autocommit=False)
    tables = "select count(*) from pg_class where relnamespace = 'pgmb'::regnamespace"
    before = one(connection, tables)
    publish(publisher)
    shorten_rests(connection)
    (told,) = lines(connection, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    assert "it is in use" in told
    assert one(connection, tables) == before


def test_many_partitions_are_made_some_at_a_time_the_nearest_first(connect):
    connection = connect()
    configure(connection, partition_interval="1 minute", future_intervals_to_create="2 hours")
    before = partitions(connection)
    told = lines(connection, "select pgmb.make_partitions('pgmb.events')")
    assert len([line for line in told if line.startswith("added")]) == 50
    assert told[-1].startswith("left ")
    assert told[-1].endswith(" partitions of events to the next time")
    now = one(connection, "select now()")
    assert any(begins <= now < ends for _, begins, ends in partitions(connection))
    report = look_after(connection)
    assert not any(line.startswith("left") for line in report.done)
    assert contiguous(connection)
    assert len(partitions(connection)) - len(before) > 100
    assert lines(connection, f"select pgmb.make_partitions('pgmb.events', '{now}')") == []


def test_many_partitions_that_are_too_long_are_replaced_some_at_a_time(connect):
    connection = connect()
    configure(connection, partition_interval="3 minutes", future_intervals_to_create="2 hours")
    look_after(connection)
    configure(connection, partition_interval="1 minute")
    told = lines(connection, "select pgmb.make_partitions('pgmb.events')")
    assert len([line for line in told if line.startswith("added")]) == 50
    assert 1 <= len([line for line in told if line.startswith("dropped")]) <= 50
    # Of that moment, whatever minute begins meanwhile.
    now = one(connection, "select now()")
    look_after(connection)
    assert contiguous(connection)
    assert lines(connection, f"select pgmb.make_partitions('pgmb.events', '{now}')") == []


def test_a_prepared_transaction_that_is_in_the_way_is_named(connect):
    log, other = connect(), connect()
    shorten_rests(log)
    name = one(log, "select current_database()")
    other.execute(
        f"begin; insert into pgmb.events (topic, payload) values ('t', '{{}}'); prepare transaction '{name}'"
    )
    try:
        told = log.execute("select pgmb.make_partitions('pgmb.events', now() + interval '1 day')").fetchall()
    finally:
        other.execute(f"rollback prepared '{name}'")
    assert told == [
        (f"postponed the partitions of events: it is in use, just now by the prepared transaction '{name}'",)
    ]
