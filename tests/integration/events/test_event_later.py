"""Events for times that have no partition yet: they are stored apart, delivered when due, and do not delay other
events."""

from __future__ import annotations

import threading

import psycopg

from tests.event_keeping import (
    dispatch,
    drop_all,
    fill_default,
    kept,
    maintain,
    place,
    publish,
    read,
    set_aside_and_due,
    subscribe,
)
from tests.limits import be_patient
from tests.tubes import one
from tests.waiting import until, waits

DEFAULT = "select count(*) from pgmb.events_default"
LATER = "select count(*) from pgmb.later"


def set_one_aside(connection):
    """Publish an event that is due in a second and is stored apart, and return its id."""
    before = one(connection, LATER)
    while True:
        (event,) = publish(connection, at="clock_timestamp() + interval '1 second'")
        place(connection)
        if one(connection, LATER) > before:
            return event
        # The event became due first, so it was not stored apart: dispatch it and try again.
        dispatch(connection)


PROBED = "select pg_stat_get_xact_tuples_returned('pgmb.later_pkey'::regclass)"


def test_events_that_wait_in_the_default_partition_are_in_theirs_when_it_is_made(connect):
    connection = connect()
    expected = publish(connection, 100, at="now() + interval '5 hours'")
    expected += publish(connection, at="now() + interval '5 days'")
    assert one(connection, DEFAULT) == 101
    maintain(connection, "3 hours")
    assert (one(connection, DEFAULT), one(connection, LATER)) == (0, 101)
    assert one(connection, "select count(*) from pgmb.unread_events") == 101
    assert one(connection, "select counted from pgmb.waiting(1000)") == 101
    place(connection, "3 hours")
    assert (one(connection, DEFAULT), one(connection, LATER)) == (0, 1)
    assert kept(connection) == expected
    assert one(connection, "select count(*) from pgmb.scheduled") == 100
    assert one(connection, "select count(*) from pgmb.published") == 0


def test_an_event_that_was_set_aside_is_delivered_although_nobody_maintains_the_log(connect):
    connection = connect()
    drop_all(connection)
    expected = set_one_aside(connection)
    subscribe(connection)
    until(connection, "select pairs = 1 from pgmb.dispatch()")
    assert read(connection) == [expected]
    assert one(connection, LATER) == 0


def test_due_events_are_dispatched_although_some_are_being_set_aside(connect, db):
    connection, placing = connect(), connect(autocommit=False)
    drop_all(connection)
    subscribe(connection)
    expected = publish(connection, 20, at="clock_timestamp() + interval '1 second'")
    assert one(placing, "select pgmb.set_aside('pgmb.events', '', 'pmg', 1)") == 1
    until(connection, "select max(event_id) < pgmb.create_event_id(clock_timestamp(), 0) from pgmb.scheduled")

    def work():
        with psycopg.connect(db, autocommit=True) as dispatching:
            dispatching.execute("select pgmb.dispatch(5)")

    working = threading.Thread(target=work)
    working.start()
    until(connection, waits(behind=placing))
    placing.commit()
    working.join()
    dispatch(connection)
    assert sorted(read(connection)) == expected


def test_an_event_that_is_changed_while_it_is_set_aside_still_has_its_time(connect, db):
    """The event is changed between the snapshot of the moving query and its lock on the row.

    Many events make that interval long enough.
    """
    connection, ended = connect(), threading.Event()
    changed = publish(connection, 5000, at="now() + interval '5 hours'")[-1]

    def work():
        with psycopg.connect(db, autocommit=True) as changing:
            while not ended.is_set():
                changing.execute("update pgmb.events set payload = 'null' where id = %s", [changed])

    working = threading.Thread(target=work)
    working.start()
    try:
        until(connection, f"select payload = 'null' from pgmb.events where id = '{changed}'")
        for _ in range(3):
            connection.execute("select pgmb.set_aside('pgmb.events', '', 'pmg', 10000)")
    finally:
        ended.set()
        working.join()
    # No event is lost: an event that another session has locked is not moved, and stays scheduled.
    assert one(connection, LATER) + one(connection, "select count(*) from pgmb.scheduled") == 5000


def test_an_id_that_is_published_again_when_it_was_set_aside_is_delivered_once(connect):
    connection = connect()
    (given,) = publish(connection, at="now() + interval '5 hours'")
    again = "insert into pgmb.events (id, topic, payload) values (%s, 't', '{}')"
    place(connection)
    connection.execute(again, [given])
    place(connection)
    connection.execute(again, [given])
    for _ in range(2):
        maintain(connection, "5 hours")
    assert one(connection, "select count(*) from pgmb.events") == 1
    assert one(connection, "select count(*) from pgmb.scheduled") == 1
    assert one(connection, LATER) == 0


def test_an_id_that_somebody_publishes_again_and_does_not_end_holds_up_no_other(connect):
    connection, publishing = connect(), connect(autocommit=False)
    subscribe(connection)
    ids = set_aside_and_due(connection, 20)
    again = "insert into pgmb.events (id, topic, payload) values (%s, 't', '{}')"
    publishing.execute(again, [ids[7]])
    others = [*ids[:7], *ids[8:], *publish(connection)]
    connection.execute("set statement_timeout = '30s'")
    dispatch(connection)
    place(connection)
    assert sorted(read(connection)) == others
    publishing.rollback()
    until(connection, "select pairs = 1 from pgmb.dispatch()")
    assert read(connection) == [ids[7]]


def test_an_event_that_somebody_is_deleting_keeps_no_other_from_being_set_aside(connect):
    connection, deleting = connect(), connect(autocommit=False)
    given = publish(connection, 2, at="now() + interval '5 days'")
    deleting.execute("delete from pgmb.events where id = %s", [given[0]])
    connection.execute("set statement_timeout = '30s'")
    place(connection)
    assert [row[0] for row in connection.execute("select id from pgmb.later")] == given[1:]
    deleting.commit()
    place(connection)
    assert kept(connection) == given[1:]


def test_scheduled_events_do_not_prevent_a_new_partition(connect):
    """There are more scheduled events than maintenance may read while publishers wait."""
    connection = connect()
    fill_default(connection, 3000, "now() + interval '5 hours'")
    place(connection)
    told = maintain(connection, "5 hours")
    assert any("added pgmb.events" in line for line in told)
    assert not any("postponed" in line for line in told)
    assert len(kept(connection)) == 3000


def test_events_that_were_taken_back_cost_nothing_while_an_old_snapshot_is_held(connect):
    """Roll back each query, so that the next query has the same work."""
    connection, old = connect(), connect(autocommit=False)
    subscribe(connection)
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    old.execute("select 1")
    set_aside_and_due(connection, 20_000)
    place(connection)
    dispatch(connection)
    assert one(connection, LATER) == 0
    for query in (
        "select pgmb.poll_for_events()",
        "select pgmb.aside(pgmb.create_event_id(clock_timestamp(), 0))",
        "select pgmb.waiting(1000)",
        "select pgmb.place_scheduled()",
    ):
        with connection.transaction(force_rollback=True):
            before = one(connection, PROBED)
            connection.execute(query)
            assert one(connection, PROBED) <= before + 10, query


def test_an_event_that_is_set_aside_later_and_due_earlier_is_delivered(connect):
    connection = connect()
    drop_all(connection)
    publish(connection, at="now() + interval '2 hours'")
    place(connection)
    assert one(connection, LATER) == 1
    expected = set_one_aside(connection)
    subscribe(connection)
    until(connection, "select pairs = 1 from pgmb.dispatch()")
    assert read(connection) == [expected]


def test_a_poll_does_not_wait_for_maintenance_that_takes_back_what_is_due(connect):
    connection, maintaining = connect(), connect(autocommit=False)
    be_patient(connection)
    subscribe(connection)
    expected = set_aside_and_due(connection, 3)
    assert one(maintaining, "select pgmb.place_scheduled()") == 3
    connection.execute("set statement_timeout = '10s'")
    assert one(connection, "select events from pgmb.dispatch()") == 0
    maintaining.commit()
    dispatch(connection)
    assert read(connection) == expected


def test_events_that_maintenance_takes_back_are_not_trimmed_by_the_same_run(connect):
    connection = connect()
    subscribe(connection)
    expected = set_aside_and_due(connection, 3)
    said = maintain(connection, "1 day")
    assert one(connection, LATER) == 0
    assert any("this transaction has published events" in line for line in said)
    dispatch(connection)
    assert read(connection) == expected


def test_publishing_and_maintenance_in_one_transaction_lose_nothing(connect):
    connection = connect()
    subscribe(connection)
    with connection.transaction():
        expected = publish(connection, 3)
        maintain(connection, "1 day")
    dispatch(connection)
    assert read(connection) == expected
