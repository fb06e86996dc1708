"""Attaching partitions in maintenance: when it waits, retries or gives way, and the partitions that it creates."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_pgchange.admin.maintenance import maintain as look_after
from tests.event_keeping import (
    configure,
    contiguous,
    kept,
    lines,
    maintain,
    partitions,
    publish,
)
from tests.limits import be_patient, shorten_rests
from tests.tubes import one
from tests.waiting import sleeps, until, waits


@pytest.fixture
def attaching(db):
    """Create partitions of events in a thread. Return the future of its log."""
    with ThreadPoolExecutor() as threads:

        def make(arguments):
            with psycopg.connect(db, autocommit=True) as connection:
                return lines(connection, f"select pgmb.make_partitions('pgmb.events', {arguments})")

        yield functools.partial(threads.submit, make)


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
    # It pauses after it has waited in vain.
    until(watching, sleeps())
    expected += publish(watching, at=at)
    publisher.commit()
    assert told.result()
    assert all("added" in line for line in told.result())
    assert contiguous(watching)
    assert kept(watching) == sorted(expected)


def test_maintenance_does_not_pause_while_it_holds_locks(connect, db):
    """During a pause all other sessions would wait for these locks.

    Here the publisher is in the way until a session pauses.
    """
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


def test_events_are_placed_the_next_time_while_another_maintenance_is_at_work(connect):
    first, second = connect(autocommit=False), connect()
    publish(second, at="now() + interval '5 hours'")
    lines(first, "select pgmb.drop_emptied('pgmb.events')")
    second.execute("set lock_timeout = '10s'")
    assert one(second, "select pgmb.place_scheduled()") == 0
    first.commit()
    assert one(second, "select pgmb.place_scheduled()") == 1


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


def test_a_partition_that_is_written_while_a_shorter_one_is_to_replace_it_stays(connect, attaching):
    connection, writer = connect(), connect(autocommit=False)
    configure(connection, partition_interval="2 hours", partition_retention_period="2 hours")
    maintain(connection, "5 hours")
    configure(connection, partition_interval="1 hour")
    be_patient(connection)
    shorten_rests(connection)
    *_, (_, lower, _) = partitions(connection)
    ids = publish(writer, at=f"timestamptz '{lower}'")
    made = attaching("now()")
    until(connection, waits(behind=writer))
    writer.commit()
    assert not any(line.startswith("dropped") for line in made.result())
    assert kept(connection) == ids


def test_partitions_are_postponed_by_a_row_that_comes_into_the_default_one_itself_while_it_is_waited_for(
    connect, attaching
):
    """A restored dump writes rows in this way."""
    watching, writer = connect(), connect(autocommit=False)
    be_patient(watching)
    shorten_rests(watching)
    writer.execute(
        "insert into pgmb.events_default (id, topic, payload) "
        "values (pgmb.create_event_id(now() + interval '4 hours', 1), 't', '{}')"
    )
    made = attaching("now() + interval '5 hours'")
    until(watching, waits(relation="pgmb.events_default", behind=writer))
    writer.commit()
    assert made.result() == ["postponed the partitions of events: it is in use"]


def test_scheduled_events_are_moved_while_no_session_waits_for_it(connect):
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


def test_maintenance_that_waits_to_attach_holds_no_lock_that_publishers_need(connect, attaching):
    """Otherwise the publisher and maintenance would wait for each other."""
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


def test_publishers_that_may_be_stopped_are_waited_for_and_then_stopped(connect, attaching):
    publisher, watching = connect(autocommit=False), connect()
    expected = publish(publisher)
    told = attaching("now() + interval '5 hours', stop_publishers => true")
    until(watching, waits(behind=publisher, seconds=1))
    publisher.commit()
    assert told.result()
    assert all("added" in line for line in told.result())
    assert kept(watching) == expected


def test_publishers_are_not_stopped_before_a_vacuum_of_the_default_partition_has_ended(connect, attaching):
    vacuum, publisher = connect(autocommit=False), connect()
    be_patient(publisher)
    vacuum.execute("lock table pgmb.events_default in share update exclusive mode")
    told = attaching("now() + interval '5 hours', stop_publishers => true")
    until(publisher, waits(relation="pgmb.events_default", behind=vacuum))
    publisher.execute("set lock_timeout = '1s'")
    expected = publish(publisher)
    vacuum.commit()
    assert told.result()
    assert all("added" in line for line in told.result())
    assert kept(publisher) == expected


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
    # The new partitions cover two hours, except the rest of a half hour that already had a partition.
    assert len(partitions(connection)) - len(before) > 80
    assert lines(connection, f"select pgmb.make_partitions('pgmb.events', '{now}')") == []


def test_many_partitions_that_are_too_long_are_replaced_some_at_a_time(connect):
    connection = connect()
    configure(connection, partition_interval="3 minutes", future_intervals_to_create="2 hours")
    look_after(connection)
    configure(connection, partition_interval="1 minute")
    told = lines(connection, "select pgmb.make_partitions('pgmb.events')")
    assert len([line for line in told if line.startswith("added")]) == 50
    assert 1 <= len([line for line in told if line.startswith("dropped")]) <= 50
    # Use one moment for all queries, even if a new minute begins in between.
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
