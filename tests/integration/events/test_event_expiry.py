"""Unused subscriptions are removed. With its last subscription a group is removed, with everything that it held."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.event_keeping import dispatch, kept, lines, maintain, publish, read, subscribe
from tests.events import claim, work
from tests.tubes import one
from tests.waiting import until, waits


def groups(connection):
    return [
        row[0] for row in connection.execute("select id from pgmb.subscription_groups order by 1").fetchall()
    ]


def subscriptions(connection):
    return [row[0] for row in connection.execute("select id from pgmb.subscriptions").fetchall()]


def expire(connection, later="20 minutes"):
    return lines(connection, f"select pgmb.expire_subscriptions(now() + interval '{later}')")


def test_a_subscription_that_was_not_active_for_its_interval_expires_with_its_group(connect):
    connection = connect()
    subscribe(connection, "passing", expiry_interval="15 minutes")
    kept_on = subscribe(connection, "lasting")
    assert expire(connection, "14 minutes") == []
    assert expire(connection) == ["1 subscriptions of group passing expired, and the group with them"]
    assert groups(connection) == ["lasting"]
    assert subscriptions(connection) == [kept_on]


def test_a_group_that_has_another_subscription_stays(connect):
    connection = connect()
    subscribe(connection, "g", "a", expiry_interval="15 minutes")
    other = subscribe(connection, "g", "b")
    assert expire(connection) == ["1 subscriptions of group g expired"]
    assert groups(connection) == ["g"]
    assert subscriptions(connection) == [other]


def test_a_group_without_subscriptions_that_never_expired_stays(connect):
    connection = connect()
    subscribe(connection, "g")
    connection.execute("delete from pgmb.subscriptions")
    assert expire(connection, "10 years") == []
    assert groups(connection) == ["g"]


def test_a_subscription_that_is_said_to_be_in_use_does_not_expire(connect):
    connection = connect()
    one_of_them = subscribe(connection, "g", "a", expiry_interval="15 minutes")
    other = subscribe(connection, "g", "b", expiry_interval="15 minutes")
    connection.execute("update pgmb.subscriptions set last_active_at = now() - interval '10 minutes'")
    assert one(connection, "select pgmb.keep_alive('g', %s)", [one_of_them]) == 1
    assert one(connection, "select pgmb.keep_alive('g', %s)", [one_of_them]) == 0
    assert expire(connection, "10 minutes") == ["1 subscriptions of group g expired"]
    assert subscriptions(connection) == [one_of_them]
    assert other


def test_events_are_held_no_longer_for_a_group_that_expired(connect):
    connection = connect()
    subscribe(connection, "passing", expiry_interval="15 minutes")
    publish(connection, 3)
    dispatch(connection)
    maintain(connection, "10 minutes")
    assert len(kept(connection)) == 3
    maintain(connection, "5 hours")
    assert kept(connection) == []
    assert connection.execute("select * from pgmb.holders()").fetchall() == []


def test_a_group_that_is_being_read_does_not_expire(connect):
    connection, reader = connect(), connect()
    subscribe(connection, "g", expiry_interval="15 minutes")
    publish(connection)
    dispatch(connection)
    reader.execute("select * from pgmb.read_next_events('g')")
    assert expire(connection) == ["postponed the expiry of group g: it is being read"]
    reader.execute("select pgmb.release_group_lock('g')")
    assert len(read(connection, "g")) == 1
    assert expire(connection) != []
    assert groups(connection) == []


def test_a_consumer_that_asks_and_finds_nothing_keeps_its_subscription(db, connect):
    connection = connect()
    subscribe(connection, "g", expiry_interval="1 hour")
    connection.execute("update pgmb.subscriptions set last_active_at = now() - interval '59 minutes'")
    assert work(db) == []
    assert expire(connection, "30 minutes") == []


def test_a_consumer_that_tries_a_batch_again_keeps_its_subscription(connect):
    connection = connect()
    subscribe(connection, "g", expiry_interval="1 hour")
    publish(connection)
    claim(connection)
    connection.execute("update pgmb.subscriptions set last_active_at = now() - interval '59 minutes'")
    assert claim(connection)["attempt"] == 2
    assert expire(connection, "30 minutes") == []


def test_nobody_who_reads_waits_for_who_is_changing_a_subscription(db, connect):
    connection, changing = connect(), connect(autocommit=False)
    changed = subscribe(connection, "g", "a", expiry_interval="1 hour")
    other = subscribe(connection, "g", "b", expiry_interval="1 hour")
    ids = publish(connection, topic="a")
    connection.execute("update pgmb.subscriptions set last_active_at = now() - interval '59 minutes'")
    changing.execute("update pgmb.subscriptions set expiry_interval = '2 hours' where id = %s", [changed])
    assert work(f"{db} options='-c statement_timeout=20s'") == ids
    changing.rollback()
    assert expire(connection, "30 minutes") == ["1 subscriptions of group g expired"]
    assert subscriptions(connection) == [other]


def test_removing_a_subscription_does_not_wait_for_a_claim_that_evaluates_it(db, connect):
    connection, holding = connect(), connect()
    slow = subscribe(
        connection, "g", conditions_sql="pg_advisory_xact_lock(1) is not null", expiry_interval="1 hour"
    )
    connection.execute("update pgmb.subscriptions set last_active_at = now() - interval '59 minutes'")
    publish(connection)
    holding.execute("select pg_advisory_lock(1)")
    claiming = threading.Thread(target=work, args=[db])
    claiming.start()
    until(connection, waits(behind=holding))
    try:
        connection.execute("set lock_timeout = '5s'")
        connection.execute("delete from pgmb.subscriptions where id = %s", [slow])
    finally:
        holding.execute("select pg_advisory_unlock(1)")
        claiming.join()
    assert subscriptions(connection) == []


@pytest.mark.parametrize(
    "end",
    ["select pgmb.drop_consumer('g')", "select pgmb.expire_subscriptions(now() + interval '20 minutes')"],
    ids=["dropped", "expired"],
)
def test_a_group_that_is_made_anew_gets_what_is_dispatched_from_then_on(connect, end):
    connection = connect()
    subscribe(connection, "g", expiry_interval="15 minutes")
    subscribe(connection, "other")
    publish(connection, 300)
    dispatch(connection)
    connection.execute(end)
    assert groups(connection) == ["other"]
    subscribe(connection, "g")
    ids = publish(connection)
    dispatch(connection)
    assert [row[0] for row in connection.execute("select id from pgmb.read_next_events('g')")] == ids
    assert one(connection, "select count(*) from pgmb.read_next_events('other')") == 301


def test_a_group_that_is_made_anew_while_events_are_dispatched_to_the_former_gets_none_of_them(connect):
    connection, dispatching = connect(), connect(autocommit=False)
    subscribe(connection, "g", expiry_interval="15 minutes")
    publish(connection, 3)
    assert one(dispatching, "select pgmb.poll_for_events()") == 3
    assert expire(connection) == [
        "postponed the expiry of group g: it is being changed, or events are being dispatched"
    ]
    with ThreadPoolExecutor() as threads:
        dropped = threads.submit(connection.execute, "select pgmb.drop_consumer('g')")
        until(connect(), waits(connection, "advisory"))
        dispatching.commit()
        dropped.result()
    subscribe(connection, "g")
    ids = publish(connection)
    dispatch(connection)
    assert [row[0] for row in connection.execute("select id from pgmb.read_next_events('g')")] == ids


def test_a_subscription_that_comes_while_its_group_expires_is_kept(connect):
    connection, other = connect(), connect(autocommit=False)
    subscribe(connection, "g", "a", expiry_interval="15 minutes")
    new = subscribe(other, "g", "b")
    connection.execute("set statement_timeout = '20s'")
    [told] = expire(connection)
    assert told.startswith("postponed the expiry of group g: it is being changed")
    other.commit()
    assert expire(connection) == ["1 subscriptions of group g expired"]
    assert subscriptions(connection) == [new]


def test_a_subscription_that_waits_for_its_group_to_expire_makes_it_anew(connect):
    expiring, subscribing, watching = connect(autocommit=False), connect(), connect()
    subscribe(watching, "g", "a", expiry_interval="15 minutes")
    expiring.execute("select from pgmb.subscription_groups where id = 'g' for update")
    made = []
    coming = threading.Thread(target=lambda: made.append(subscribe(subscribing, "g", "b")))
    coming.start()
    until(watching, waits(subscribing))
    assert expire(expiring) == ["1 subscriptions of group g expired, and the group with them"]
    expiring.commit()
    coming.join()
    assert subscriptions(watching) == made != []
    assert groups(watching) == ["g"]


def test_maintenance_expires_subscriptions(connect):
    connection = connect()
    subscribe(connection, "passing", expiry_interval="15 minutes")
    assert any("group passing expired" in line for line in maintain(connection, "20 minutes"))


def test_a_subscription_that_would_expire_while_it_is_in_use_is_refused(connect):
    connection, too_short = connect(), ("-1 day", "0", "900 milliseconds")
    for expiry in too_short:
        with pytest.raises(psycopg.errors.CheckViolation, match="expiry_interval_is_at_least_a_second"):
            subscribe(connection, "g", expiry_interval=expiry)
    sid = subscribe(connection, "g", expiry_interval="1 second")
    update = "update pgmb.subscriptions set expiry_interval = %s where id = %s"
    for expiry in too_short:
        with pytest.raises(psycopg.errors.CheckViolation, match="expiry_interval_is_at_least_a_second"):
            connection.execute(update, [expiry, sid])


@pytest.mark.parametrize(
    "columns",
    [
        {"expiry_interval": "10000 years"},
        {"expiry_interval": "999999999 days"},
        {"expiry_interval": "-300000 years"},
        {"expiry_interval": "1 year", "last_active_at": "294276-12-31"},
    ],
)
def test_a_subscription_that_would_expire_at_no_time_that_can_be_said_is_refused(unchanged, columns):
    """Otherwise maintenance would fail here, and would then do nothing for any group."""
    with pytest.raises((psycopg.errors.CheckViolation, psycopg.errors.DatetimeFieldOverflow)):
        subscribe(unchanged, "g", **columns)
