"""The lag of a group, and whether it has reached a point."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.feeds import end_position
from airflow_pgchange.feeds.consumer_state import lag as feed_lag
from tests.event_keeping import set_aside_and_due
from tests.events import FEED, TOPICAL, lag, poll_all, publish, publish_at, subscribe, work, work_all
from tests.findings import findings
from tests.waiting import until

FIVE_MINUTES = "5 minutes"


def test_the_lag_is_what_a_claim_would_give(db, connect):
    connection = connect()
    subscribe(connection)
    assert feed_lag(connection, connection, FEED, 100).ready == 0
    publish(connection, *["t"] * 30)
    found = feed_lag(connection, connection, FEED, 100)
    assert (found.ready, found.ready_exact, found.waiting) == (30, True, 0)
    assert work(db, limit=20)
    assert feed_lag(connection, connection, FEED, 100).ready == 10


def test_the_lag_beyond_what_was_asked_for_is_an_estimate_that_is_not_too_low(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, *["t"] * 3000)
    found = lag(connection, upto=10)
    assert (found["ready"] >= 3000, found["ready_exact"]) == (True, False)


def test_the_estimate_of_a_groups_backlog_leaves_out_what_other_groups_get(connect):
    connection = connect()
    connection.execute("update pgmb.config set value = '100' where id = 'poll_chunk_size'")
    for group in ("few", "many"):
        subscribe(connection, group, TOPICAL, {"topic": group})
    publish(connection, *["few"] * 300, *["many"] * 3000)
    poll_all(connection)
    told = dict(connection.execute("select feed ->> 'group', ready from pgmb.status(10)").fetchall())
    assert 150 <= told["few"] <= 600
    assert 1500 <= told["many"] <= 6000
    ((few,),) = connection.execute("select pgmb.lag('few', pgmb.position('few'), 10) -> 'ready'").fetchall()
    assert few == told["few"]


@pytest.mark.parametrize("upto", [-1, None])
def test_ready_changes_are_counted_up_to_a_number(connect, upto):
    connection = connect()
    subscribe(connection)
    for call in ("pgmb.status(%s)", "pgmb.lag('g', pgmb.position('g'), %s)"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="upto must not be negative"):
            connection.execute(f"select {call}", [upto])


def test_a_group_with_several_subscriptions_lags_by_events_not_by_pairs(connect):
    connection = connect()
    subscribe(connection)
    subscribe(connection, "g", TOPICAL, {"topic": "t"})
    publish(connection, *["t"] * 30)
    assert lag(connection)["ready"] == 30


def test_events_in_the_future_wait(connect):
    connection = connect()
    subscribe(connection)
    publish_at(connection, "now() + interval '1 hour'")
    found = lag(connection)
    assert (found["ready"], found["waiting"], found["waiting_exact"]) == (0, 1, False)


def test_events_that_nobody_dispatches_are_a_finding_after_an_hour_if_there_is_a_group(connect):
    connection = connect()
    publish(connection, "t")
    undispatched = (FIVE_MINUTES, "0.001 s")
    connection.execute("select pg_sleep(0.01)")
    assert findings(connection, "pgmb", *undispatched) == []
    subscribe(connection)
    publish(connection, "t")
    connection.execute("select pg_sleep(0.01)")
    assert findings(connection, "pgmb") == []
    (found,) = findings(connection, "pgmb", *undispatched)
    assert found.startswith("events: 2 events waiting to be dispatched, the oldest for 00:00:0")
    assert found.endswith(
        ", and nobody dispatches: no watcher looks, and no consumer claims; select pgmb.poll_for_events()"
    )
    poll_all(connection)
    assert findings(connection, "pgmb", *undispatched) == []


def test_faults_of_a_condition_are_in_the_lag(connect):
    connection = connect()
    subscribe(connection, "g", "(e.payload ->> 'n')::int > 0")
    publish(connection, "t", payload={"n": "none"})
    assert lag(connection)["faults"] == 1


def test_the_lag_asked_in_a_read_only_transaction_dispatches_nothing_and_says_what_waits(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    connection.execute("set default_transaction_read_only = on")
    found = lag(connection)
    assert (found["ready"], found["waiting"]) == (0, 1)


def test_the_lag_on_a_standby_says_what_is_ready(own_cluster, own_database, connect_to):
    connection = connect_to(own_database)
    subscribe(connection)
    publish(connection, "a", "b")
    poll_all(connection)
    standby = own_cluster.standby()
    try:
        standby.wait_for_replay(own_cluster)
        assert feed_lag(connection, connect_to(standby.conninfo()), FEED, 10).ready == 2
    finally:
        standby.remove()


def test_a_point_is_passed_when_all_that_was_published_before_it_is_done(db, connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    point = end_position.point(connection, FEED)
    publish(connection, "b")
    assert not end_position.has_passed(connection, connection, FEED, point)[0]
    work_all(db, limit=10)
    passed, goal, _ = end_position.has_passed(connection, connection, FEED, point)
    assert passed
    assert end_position.has_passed(connection, connection, FEED, goal)[0]


def test_a_point_is_passed_when_all_that_was_due_before_it_is_done(db, connect):
    connection = connect()
    subscribe(connection)
    connection.execute("update pgmb.config set value = '10' where id = 'poll_chunk_size'")
    for number in range(30):
        publish_at(connection, "clock_timestamp() + interval '1 second'", number=number)
    until(connection, "select max(event_id) < pgmb.create_event_id(clock_timestamp(), 0) from pgmb.scheduled")
    passed, goal, _ = end_position.has_passed(
        connection, connection, FEED, end_position.point(connection, FEED)
    )
    done = 0
    while not passed:
        done += len(work(db, limit=10))
        passed, goal, _ = end_position.has_passed(connection, connection, FEED, goal)
    assert done == 30


def test_a_point_is_passed_when_what_was_due_before_it_and_set_aside_is_done(db, connect):
    connection = connect()
    subscribe(connection)
    set_aside_and_due(connection, 3)
    passed, goal, _ = end_position.has_passed(
        connection, connection, FEED, end_position.point(connection, FEED)
    )
    done = 0
    for _ in range(10):
        if passed:
            break
        done += len(work(db, limit=10))
        passed, goal, _ = end_position.has_passed(connection, connection, FEED, goal)
    assert (passed, done) == (True, 3)


def test_a_point_is_passed_by_a_group_that_gets_nothing_of_it(connect):
    connection = connect()
    subscribe(connection, "g", "false")
    publish(connection, "a")
    assert end_position.has_passed(connection, connection, FEED, end_position.point(connection, FEED))[0]
