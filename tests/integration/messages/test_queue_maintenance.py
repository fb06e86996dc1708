"""Maintenance of queues beside transactions that stay open: it waits for none of them, and no session waits for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.limits import be_patient
from tests.queues import consume, consumen, consumer, drain, fill, make, one, post, take, there
from tests.waiting import pause_after, until, waits

pytestmark = pytest.mark.hstore


@pytest.fixture
def q(connect):
    """A connection that fails if it would have to wait for a lock."""
    connection = connect()
    make(connection)
    connection.execute("set lock_timeout = '5s'")
    return connection


def test_maintenance_and_a_session_that_took_a_message_do_not_wait_for_each_other(q, connect, connect_to, db):
    session = connect_to(db)
    left_over = one(session, "select mbus.create_temporary_consumer('q')")
    session.close()
    until(q, f"select not mbus.lives('q {left_over}')")
    iids = fill(q, [1, 2])
    taker = connect(autocommit=False)
    assert take(taker, iids[0]) == "1"
    q.execute("select mbus.maintain()")
    assert take(q, iids[1]) == "2"
    names = "select array_agg(name order by name) from mbus.consumer"
    assert one(q, names) == ["default", left_over]
    taker.commit()
    q.execute("select mbus.maintain()")
    assert one(q, names) == ["default"]


def test_a_temporary_consumer_stays_while_another_one_is_made(q, connect, connect_to, db):
    session = connect_to(db)
    left_over = one(session, "select mbus.create_temporary_consumer('q')")
    session.close()
    until(q, f"select not mbus.lives('q {left_over}')")
    names = "select array_agg(name order by name) from mbus.consumer"
    pause_after(q, "insert on mbus.consumer")
    q.execute("select pg_advisory_lock(1)")
    maker = connect()
    with ThreadPoolExecutor() as pool:
        made = pool.submit(consumer, maker, "other")
        until(q, waits(maker, key="1"))
        q.execute("select mbus.clear_tempq()")
        meanwhile = one(q, names)
        q.execute("select pg_advisory_unlock(1)")
        made.result()
    assert meanwhile == ["default", left_over]
    q.execute("select mbus.clear_tempq()")
    assert one(q, names) == ["default", "other"]


def test_a_temporary_queue_that_another_maintenance_removes_is_not_waited_for(q, connect, connect_to, db):
    session = connect_to(db)
    reply = one(session, "select mbus.create_temporary_queue()")
    post(q, 1, reply)
    session.close()
    until(q, f"select not mbus.lives('{reply}')")
    be_patient(q)
    first = connect(autocommit=False)
    first.execute("select mbus.clear_tempq()")
    q.execute("set statement_timeout = '10s'")
    q.execute("select mbus.clear_tempq()")
    first.rollback()
    q.execute("select mbus.clear_tempq()")
    assert one(q, "select count(*) from mbus.temporary") == 0


def test_maintenance_does_not_wait_for_the_receiver_of_an_expired_temporary_message(q, connect):
    reply = one(q, "select mbus.create_temporary_queue()")
    holder = connect(autocommit=False)
    # A late worker posts another message.
    while consume(holder, queue=reply) is None:
        post(q, 1, reply, expires="1s")
    until(q, "select every(expires < clock_timestamp()) from mbus.tempq")
    q.execute("select mbus.maintain()")
    holder.rollback()
    q.execute("select mbus.maintain()")
    assert one(q, "select count(*) from mbus.tempq") == 0


def test_maintenance_does_not_wait_for_the_receiver_of_an_expired_waiting_message(q, connect):
    post(q, 2, after=[post(q, 1)], expires="1h")
    assert consumen(q, 9) == ["1"]
    holder = connect(autocommit=False)
    assert consume(holder) == "2"
    q.execute('update mbus."log$q" set expires = clock_timestamp() where id = 2')
    q.execute("select mbus.maintain()")
    holder.rollback()
    q.execute("select mbus.maintain()")
    assert there(q) == []
    assert drain(q) == []


def test_maintenance_that_deletes_a_message_which_had_to_wait_is_not_waited_for(q, connect):
    first = post(q, 1)
    for n in (2, 3, 4, 5):
        post(q, n, after=[first], expires="1h")
    assert consumen(q, 9) == ["1"]
    assert consumen(q, 2) == ["2", "3"]
    q.execute('update mbus."log$q" set expires = clock_timestamp() where id = 4')
    maintaining = connect(autocommit=False)
    maintaining.execute("select mbus.maintain()")
    assert consumen(q, 9) == ["5"]
    maintaining.commit()
    assert drain(q) == []


def test_a_consumer_that_deletes_what_all_have_received_is_not_waited_for(q, connect):
    fill(q, range(3000))
    assert len(consumen(q, 500)) == 500
    holder = connect(autocommit=False)
    assert len(consumen(holder, 1000)) == 1000
    assert len(there(q)) == 2500
    assert one(holder, 'select count(*) from mbus."log$q"') == 2500
    q.execute("select mbus.maintain()")
    holder.rollback()
    assert len(drain(q)) == 2500
    q.execute("select mbus.maintain()")
    assert one(q, 'select count(*) from mbus."log$q"') == 0


def test_dropping_a_consumer_waits_for_its_receivers(q, connect):
    consumer(q, "other")
    fill(q, [1])
    number = one(q, "select id from mbus.consumer where name = 'other'")
    holder = connect(autocommit=False)
    assert consume(holder, "other") == "1"
    with ThreadPoolExecutor(1) as threads:
        drop = threads.submit(connect().execute, "select mbus.drop_consumer('other', 'q')")
        until(q, waits(kind="advisory"))
        holder.commit()
        drop.result()
    assert one(q, "select count(*) from mbus.receipt where consumer = %s", number) == 0


def test_maintenance_does_not_wait_long_for_a_session_that_drops_a_queue(q, connect):
    make(q, "r")
    holder = connect(autocommit=False)
    holder.execute("select mbus.drop_queue('r')")
    q.execute("set lock_timeout = 0")
    q.execute("set statement_timeout = '20s'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        q.execute("select mbus.maintain()")
    holder.commit()
    q.execute("select mbus.maintain()")


def test_maintenance_reads_no_backlog_that_nobody_has_received(q, connect):
    consumer(q, "other")
    fill(q, range(2000))
    maintaining = connect(autocommit=False)
    assert one(maintaining, "select mbus.maintain()") == 0
    assert one(maintaining, "select pg_stat_get_xact_tuples_returned('mbus.log$q_pkey'::regclass)") < 100


def test_unwanted_messages_are_deleted_up_to_a_wanted_message(q):
    consumer(q, "idle", "(data -> 'n')::integer < 2600")
    fill(q, range(3000))
    assert len(drain(q)) == 3000
    assert [one(q, "select mbus.maintain()") for _ in range(3)] == [0, 400, 0]
    assert len(drain(q, "idle")) == 2600


def test_taken_messages_above_the_position_of_an_idle_consumer_are_deleted(q):
    consumer(q, "idle", "true")
    iids = fill(q, range(9))
    assert len(drain(q)) == 9
    assert take(q, iids[4]) == "4"
    assert one(q, "select mbus.maintain()") == 1
    assert drain(q, "idle") == ["0", "1", "2", "3", "5", "6", "7", "8"]


def test_maintenance_moves_an_idle_consumer_only_past_unwanted_messages(q, connect):
    """The consumer of a selector that matches nothing is never woken, so only maintenance can move it."""
    consumer(q, "picky", "(t.properties -> 'kind') = 'rare'")
    late = connect(autocommit=False)
    post(late, "late", kind="rare")
    fill(q, range(2000))
    q.execute("select mbus.maintain_queue('q')")
    ready = "select mbus.lag('q', 'picky', 1) -> 'ready'"

    def read_for_a_look():
        read = "select pg_stat_get_xact_blocks_fetched('mbus.log$q'::regclass)"
        with q.transaction():
            before = one(q, read)
            assert one(q, ready) == 0
            return one(q, read) - before

    assert read_for_a_look() < 10
    late.commit()
    assert one(q, ready) == 1
    post(q, "wanted", kind="rare")
    fill(q, range(2000))
    q.execute("select mbus.maintain_queue('q')")
    assert drain(q, "picky") == ["late", "wanted"]


def test_a_run_locks_about_a_thousand_parts_and_each_consumer_gets_its_turn(connect):
    """More locks may not fit into the lock table of the server."""
    connection = connect()
    make(connection, "wide", parts=600)
    for name in ("one", "two"):
        consumer(connection, name, "false", queue="wide")
    fill(connection, range(1000), "wide")
    connection.execute("select setseed(0.5)")
    with connection.transaction():
        connection.execute("select mbus.maintain_queue('wide')")
        assert one(connection, "select count(*) from pg_locks where locktype = 'advisory'") < 1000
    for _ in range(10):
        connection.execute("select mbus.maintain_queue('wide')")
    passed = "select count(distinct consumer) from mbus.position where consumer > 0 and done = 1000"
    assert one(connection, passed) == 2


def test_a_consumer_that_another_transaction_claims_for_is_not_stepped_over(q, connect):
    consumer(q, "picky", "(t.properties -> 'kind') = 'rare'")
    fill(q, range(2000))
    post(q, "wanted", kind="rare")
    taker = connect(autocommit=False)
    assert consumen(taker, 10, "picky") == ["wanted"]
    fill(q, range(2000))
    q.execute("select mbus.maintain_queue('q')")
    taker.rollback()
    q.execute("select mbus.maintain_queue('q')")
    assert drain(q, "picky") == ["wanted"]
