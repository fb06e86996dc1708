"""Events that were already dispatched are read again: those of one subscription, by its id, each once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.events.replay import replay
from tests.events import TOPICAL, drain, error, poll_all, publish, publish_at, subscribe
from tests.tubes import one


def test_a_replay_gives_what_came_after_an_event_in_order_of_dispatch(connect):
    connection, late = connect(), connect(autocommit=False)
    sid = subscribe(connection, "g", TOPICAL, {"topic": "a"})
    old = publish(late, "a")
    ids = publish(connection, "a", "b", "a", "a")
    drain(connection)
    late.commit()
    drain(connection)
    rows = connection.execute("select id from pgmb.replay_events('g', %s, %s, 10)", [sid, ids[0]]).fetchall()
    assert [row[0] for row in rows] == [ids[2], ids[3], *old]


def test_a_replay_is_whole_and_in_order_where_a_dispatch_went_to_several_subscriptions_of_the_group(connect):
    connection = connect()
    sid = subscribe(connection)
    subscribe(connection, conditions=TOPICAL, params={"topic": "x0"})
    ids = publish(connection, *[f"x{i % 2}" for i in range(900)])
    poll_all(connection)
    replayed = connection.execute(
        "select id from pgmb.replay_events('g', %s, %s, 900)", [sid, ids[99]]
    ).fetchall()
    assert [event for (event,) in replayed] == ids[100:]


def test_a_replay_gives_a_new_subscription_older_events_that_fit_and_at_most_so_many(connect):
    connection = connect()
    first = publish(connection, "a", "b", "a", "a")
    poll_all(connection)
    sid = subscribe(connection, "g", TOPICAL, {"topic": "a"})
    later = publish(connection, "a")
    poll_all(connection)
    query = "select id from pgmb.replay_events('g', %s, pgmb.create_event_id('2001-01-01', 0), %s)"
    every = [row[0] for row in connection.execute(query, [sid, 10]).fetchall()]
    assert every == [first[0], first[2], first[3], *later]
    assert [row[0] for row in connection.execute(query, [sid, 2]).fetchall()] == every[:2]


def test_a_replay_gives_a_new_subscription_all_older_events_also_behind_one_that_was_committed_late(connect):
    connection, late = connect(), connect(autocommit=False)
    held_up = publish(late, "a")
    first = publish(connection, "a", "b", "a")
    poll_all(connection)
    sid = subscribe(connection, "g", TOPICAL, {"topic": "a"})
    late.commit()
    backdated = publish_at(connection, "now() - interval '10 minutes'", "a")
    poll_all(connection)
    query = "select id from pgmb.replay_events('g', %s, pgmb.create_event_id('2001-01-01', 0), %s)"
    every = [row[0] for row in connection.execute(query, [sid, 10]).fetchall()]
    assert every == [first[0], first[2], backdated, *held_up]
    assert [row[0] for row in connection.execute(query, [sid, 3]).fetchall()] == every[:3]


def test_a_replay_does_not_give_what_is_about_to_be_dispatched(connect):
    connection = connect()
    old = publish(connection, "a")
    poll_all(connection)
    sid = subscribe(connection, "g", TOPICAL, {"topic": "a"})
    waiting = [publish(connection, "a")[0] for _ in range(3)]
    connection.execute("select pgmb.dispatch(1)")
    due = publish_at(connection, "now() - interval '10 minutes'", "a")
    query = "select id from pgmb.replay_events('g', %s, pgmb.create_event_id('2001-01-01', 0), 10)"
    replayed = [row[0] for row in connection.execute(query, [sid]).fetchall()]
    assert replayed == [*old, waiting[0]]
    poll_all(connection)
    assert set(drain(connection)) == {*waiting, due}


def test_a_replay_brings_no_retries_again(connect):
    connection = connect()
    sid = subscribe(connection, "g", TOPICAL, {"topic": "t"})
    ids = publish(connection, "t", "t")
    poll_all(connection)
    connection.execute(
        "select pgmb.retry_events(%s, 'h', %s, 'no', 1, '0 s')",
        [[sid], Jsonb([{"id": ids[0], "topic": "t", "payload": {}, "metadata": {}}])],
    )
    poll_all(connection)
    query = "select topic from pgmb.replay_events('g', %s, pgmb.create_event_id('2001-01-01', 0), 3)"
    assert connection.execute(query, [sid]).fetchall() == [("t",), ("t",)]
    assert one(connection, "select count(*) from pgmb.events where topic = 'pgmb-retry'") == 1


def test_a_replay_that_is_done_again_brings_each_event_once(connect):
    connection = connect()
    sid, since = subscribe(connection), datetime.now(UTC) - timedelta(minutes=1)
    publish(connection, "a", "b", "c")
    drain(connection)
    for _ in range(3):
        assert replay(connection, "g", sid, since, 1000) == 3
        assert len(drain(connection)) == 3


def test_a_replay_brings_a_copy_where_the_log_has_let_go_of_its_event(connect):
    connection = connect()
    sid, since = subscribe(connection), datetime.now(UTC) - timedelta(minutes=1)
    ids = publish(connection, "a", "b", "c")
    drain(connection)
    replay(connection, "g", sid, since, 1000)
    drain(connection)
    connection.execute("delete from pgmb.events where id = any (%s)", [ids])
    assert replay(connection, "g", sid, since, 1000) == 3


def test_a_replay_of_another_groups_subscription_is_refused(connect):
    connection = connect()
    subscribe(connection, "g")
    theirs = subscribe(connection, "h")
    refused = error(connection, "select pgmb.replay_events('g', %s, %s, 1)", theirs, "pm" + "0" * 22)
    assert refused.sqlstate == "PC002"


def test_a_replay_behind_no_event_is_refused(connect):
    connection = connect()
    sid = subscribe(connection)
    refused = error(connection, "select pgmb.replay_events('g', %s, null, 1)", sid)
    assert (refused.sqlstate, "not an event id" in str(refused)) == ("22023", True)


@pytest.mark.parametrize("most", ["0", "-1", "null"])
def test_a_replay_of_no_events_is_refused(connect, most):
    connection = connect()
    sid = subscribe(connection)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="at least 1 event"):
        connection.execute(f"select * from pgmb.replay_events('g', '{sid}', 'pm{'0' * 22}', {most})")
