"""Scheduled events: delivered when due, a chunk at a time, also if they are committed after that time."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.errors import DispatchEnded
from airflow_pgchange.events import dispatch as dispatching
from tests.event_keeping import dispatch, publish, read, subscribe
from tests.tubes import one
from tests.waiting import until

IN_HALF_A_SECOND = "clock_timestamp() + interval '500 ms'"


def over(connection, ids):
    """Wait until all of these events are due."""
    until(connection, f"select clock_timestamp() > pgmb.extract_date_from_event_id('{max(ids)}')")


def idle(connection):
    """Return the buffers that a poll without work reads."""
    plan = one(connection, "explain (analyze, buffers, format json) select pgmb.dispatch()")[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


@pytest.fixture
def late(connect):
    """A log, and 35 events of a transaction that commits late: other events of the same time were already dispatched."""
    connection, publisher = connect(), connect(autocommit=False)
    subscribe(connection)
    ids = publish(publisher, 35, at=IN_HALF_A_SECOND)
    on_time = publish(connection, at=IN_HALF_A_SECOND)
    over(connection, ids + on_time)
    dispatch(connection)
    assert read(connection) == on_time
    publisher.commit()
    return connection, sorted(ids)


def test_events_that_are_committed_after_their_time_come_a_chunk_at_a_time_and_in_order(late):
    connection, ids = late
    published = publish(connection, 5)
    due = publish(connection, 5, at="clock_timestamp() + interval '10 ms'")
    over(connection, due)
    polls = [one(connection, "select events from pgmb.dispatch(10)") for _ in range(3)]
    assert polls == [10, 10, 10]
    assert one(connection, "select counted from pgmb.waiting(1000)") == 15
    assert read(connection) == ids[:30]
    dispatch(connection)
    assert sorted(read(connection)) == sorted(ids[30:] + published + due)
    assert one(connection, "select count(*) from pgmb.scheduled") == 0


def test_a_transaction_that_ends_while_late_events_are_dispatched_comes_behind_them(late, connect):
    connection, ids = late
    publisher = connect(autocommit=False)
    more = publish(publisher, 15, at="clock_timestamp() + interval '10 ms'")
    over(connection, more)
    connection.execute("select pgmb.dispatch(10)")
    publisher.commit()
    connection.execute("select pgmb.dispatch(10)")
    published = publish(connection, 3)
    while one(connection, "select more from pgmb.dispatch(10)"):
        pass
    assert read(connection)[:35] == ids
    dispatch(connection)
    seen = connection.execute("select distinct unnest(event_ids) from pgmb.dispatched").fetchall()
    assert {row[0] for row in seen} >= {*ids, *more, *published}
    assert one(connection, "select sum(cardinality(event_ids)) from pgmb.dispatched") == 1 + 35 + 15 + 3


def test_events_of_a_time_before_which_the_clock_was_set_back_wait_for_it(connect):
    connection = connect()
    subscribe(connection)
    publish(connection)
    dispatch(connection)
    # Return the events that remain after a poll whose clock is an hour ahead.
    ahead = "pgmb.create_event_id(now() + interval '1 hour', 0)"
    set_back = f"update pgmb.dispatcher set scheduled_upto = {ahead}, last_id = {ahead}"
    connection.execute(set_back)
    publish(connection, at="now() + interval '30 minutes'")
    (later,) = publish(connection, at="clock_timestamp() + interval '500 ms'")
    publish(connection)
    over(connection, [later])
    dispatch(connection)
    assert len(read(connection)) == 3
    # Now a poll sees the event's transaction before the event is due.
    connection.execute(set_back)
    (later,) = publish(connection, at="clock_timestamp() + interval '500 ms'")
    dispatch(connection)
    found = read(connection)
    over(connection, [later])
    dispatch(connection)
    assert found + read(connection) == [later]


def test_an_event_whose_time_a_poll_had_passed_before_it_saw_the_event_comes_with_what_is_published_next(
    connect,
):
    connection = connect()
    subscribe(connection)
    publish(connection)
    dispatch(connection)
    (later,) = publish(connection, at="clock_timestamp() + interval '20 ms'")
    over(connection, [later])
    # Pretend that the poll reads the clock only now, long after it took its snapshot.
    connection.execute("update pgmb.dispatcher set scheduled_upto = pgmb.due_before()")
    (published,) = publish(connection)
    dispatch(connection)
    assert read(connection)[1:] == [later, published]


def test_a_poll_with_nothing_to_do_costs_no_more_after_many_were_due_although_an_old_snapshot_is_held(
    connect,
):
    connection, old = connect(), connect(autocommit=False)
    subscribe(connection)
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    old.execute("select from pgmb.scheduled").fetchall()
    ids = publish(connection, 20_000, at="clock_timestamp() + interval '1 second'")
    over(connection, ids)
    dispatch(connection)
    assert one(connection, "select count(*) from pgmb.scheduled") == 0
    assert min(idle(connection) for _ in range(3)) < 50


@pytest.mark.parametrize("is_open", [False, True], ids=["alone", "beside an open transaction"])
def test_a_poll_with_nothing_to_do_costs_no_more_with_many_that_are_not_due(connect, is_open):
    connection, older = connect(), connect(autocommit=False)
    subscribe(connection)
    if is_open:
        older.execute("select pg_current_xact_id()")
    publish(connection, 20_000, at="now() + interval '1 hour'")
    dispatch(connection)
    assert min(idle(connection) for _ in range(3)) < 50


def test_a_poll_that_is_ended_at_no_condition_says_so(connect):
    connection = connect()
    subscribe(connection)
    publish(connection)
    connection.execute(
        "create function public.stalls() returns trigger language plpgsql as "
        "'begin perform pg_sleep(60); return new; end'; "
        "create trigger stalls before insert on pgmb.dispatched for each row execute function public.stalls()"
    )
    with pytest.raises(DispatchEnded, match=r"not at a condition: .*timeout"):
        dispatching.dispatch(connection, timeout=2)
    connection.execute("drop function public.stalls() cascade")
    assert dispatching.dispatch(connection).pairs == 1
