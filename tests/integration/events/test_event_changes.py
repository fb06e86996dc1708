"""A subscription is changed while a poll evaluates its condition: it still gets each event once."""

from __future__ import annotations

import pytest

from tests.events import drain, poll, publish, subscribe
from tests.handling import in_thread
from tests.tubes import one
from tests.waiting import until, waits

GATE = "pg_advisory_xact_lock_shared(77)::text is not null"
OTHER = "e.topic <> 'x'"


@pytest.fixture
def meanwhile(connect):
    """A function that makes a change while the call ``what`` pauses between two conditions.

    ``TRUE`` is evaluated before the pause, and ``OTHER`` after it.
    """
    connection = connect()
    subscribe(connection, "gate", GATE)
    for conditions in ("TRUE", OTHER):
        subscribe(connection, "all", conditions)

    def do(what, change):
        connection.execute("select pg_advisory_lock(77)")
        ended = in_thread(what, connect())
        until(connection, waits(key="77"))
        with connection.transaction():
            change(connection)
        connection.execute("select pg_advisory_unlock(77)")
        return ended()

    return do


@pytest.mark.parametrize(("before", "after"), [("TRUE", OTHER), (OTHER, "TRUE")])
def test_an_event_comes_once_though_its_condition_is_changed_while_a_poll_runs(
    connect, meanwhile, before, after
):
    connection = connect()
    sid = subscribe(connection, "g", before)
    ids = publish(connection, "t")
    change = "update pgmb.subscriptions set conditions_sql = %s where id = %s"
    meanwhile(poll, lambda own: own.execute(change, [after, sid]))
    assert drain(connection) == ids


def test_an_event_comes_though_its_subscription_is_replaced_while_a_poll_runs(connect, meanwhile):
    connection = connect()
    sid = subscribe(connection, "g", OTHER)
    ids = publish(connection, "t")

    def replace(own):
        subscribe(own, "g", "TRUE")
        own.execute("delete from pgmb.subscriptions where id = %s", [sid])

    meanwhile(poll, replace)
    assert drain(connection) == ids


def test_a_replay_of_faults_loses_none_though_a_condition_is_changed_while_it_runs(connect, meanwhile):
    connection = connect()
    failing = "1 / (s.params ->> 'n')::int > 0"
    subscribe(connection, "a", f"{failing} and {GATE}", {"n": 0})
    subscribe(connection, "b", failing, {"n": 0})
    ids = publish(connection, "t")
    poll(connection)
    assert one(connection, "select count(*) from pgmb.fault") == 2
    connection.execute("update pgmb.subscriptions set params = '{\"n\": 1}' where params ? 'n'")
    meanwhile(
        lambda own: own.execute("select pgmb.replay_faults()"),
        lambda own: own.execute("update pgmb.subscriptions set conditions_sql = 'TRUE' where group_id = 'b'"),
    )
    assert drain(connection, "b") == ids
