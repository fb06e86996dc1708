"""The watermark, for people who write SQL themselves."""

from __future__ import annotations

import threading

import pytest
from psycopg import errors

from airflow_pgchange.errors import UnknownConsumer
from airflow_pgchange.feeds import ConsumerTransaction
from tests.commits import FEED, commits, drain
from tests.waiting import until


@pytest.mark.parametrize("call", ["pubsub.lock_watermark('test', 0)", "pubsub.poll('test', 0)"])
@pytest.mark.parametrize("holder", ["by hand", "feed"])
def test_while_one_holds_the_watermark_others_wait(db, connect, holder, call):
    connection, other = connect(), connect(autocommit=False)
    connection.execute("select pubsub.lock_watermark('test', 0)")
    commits(connection)
    connection.execute("set lock_timeout = 50")
    if holder == "by hand":
        other.execute("select pubsub.lock_watermark('test', 0)")
        with pytest.raises(errors.LockNotAvailable):
            connection.execute(f"select {call}")
        other.commit()
    else:
        with ConsumerTransaction(FEED, db), pytest.raises(errors.LockNotAvailable):
            connection.execute(f"select {call}")
    connection.execute(f"select {call}")


def test_who_holds_the_watermark_by_hand_keeps_feeds_off_and_no_other_consumer(db, connect):
    holder = connect(autocommit=False)
    holder.execute("select pubsub.lock_watermark('test', 0)")
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.busy
    connection = connect()
    connection.execute("set lock_timeout = 50")
    connection.execute("select pubsub.lock_watermark('another', 0)")
    holder.commit()
    with ConsumerTransaction(FEED, db) as consumer:
        assert not consumer.busy


def test_the_watermark_tells_up_to_where_and_the_last_commit(own_database, connect_to):
    connection = connect_to(own_database)
    expected = commits(connection, 3)
    drain(own_database)
    txid, commit = connection.execute("select txid::text::bigint, commit_id from pubsub.watermark").fetchone()
    of_commits = connection.execute("select max(txid::text::bigint) from revision.commit_queue").fetchone()[0]
    assert of_commits < txid <= of_commits + 3
    assert commit == expected[-1]


def test_two_consumers_know_nothing_of_each_other(connect):
    connection = connect()
    for name in ("one", "two"):
        connection.execute("select pubsub.lock_watermark(%s, 0)", [name])
    expected = commits(connection, 3)
    for name in ("one", "two"):
        got = connection.execute("select id from pubsub.poll(%s, 0)", [name]).fetchall()
        assert [row[0] for row in got] == expected


def test_commits_of_a_poll_that_is_rolled_back_come_again(connect):
    connection = connect()
    connection.execute("select pubsub.lock_watermark('test', 0)")
    expected = commits(connection, 3)
    got = []
    for keep in (False, True):
        with connection.transaction(force_rollback=not keep):
            got.append(
                [row[0] for row in connection.execute("select id from pubsub.poll('test', 0)").fetchall()]
            )
    assert got == [expected, expected]
    assert connection.execute("select id from pubsub.poll('test', 0)").fetchall() == []


def test_polling_under_a_stricter_isolation_is_refused(connect):
    connection = connect()
    connection.execute("select pubsub.lock_watermark('test', 0)")
    with pytest.raises(errors.Error, match="read committed"), connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select pubsub.poll('test', 0)")


def test_a_consumer_that_is_dropped_while_another_waits_for_it_is_told(db, connect):
    holder, connection = connect(autocommit=False), connect()
    commits(connection)
    drain(db)
    holder.execute("select pubsub.drop_consumer('test', 0)")
    told = []

    def wait_and_claim():
        try:
            with ConsumerTransaction(FEED, db, busy_timeout=None) as consumer:
                consumer.claim(1)
        except UnknownConsumer as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait_and_claim)
    waiting.start()
    until(
        connection,
        "select count(*) = 1 from pg_stat_activity where datname = current_database() "
        "and state = 'idle in transaction' and application_name = 'airflow_pgchange'",
    )
    holder.commit()
    waiting.join()
    assert len(told) == 1
    assert "open another" in told[0]
    assert len(drain(db)) == 1


def test_lock_watermark_makes_a_consumer_at_zero(connect):
    connection = connect()
    row = connection.execute("select txid::text, commit_id from pubsub.lock_watermark('hand', 0)").fetchone()
    assert row == ("0", 0)


def test_lock_watermark_waits_for_another_holder(connect):
    first, second = connect(autocommit=False), connect()
    first.execute("select pubsub.lock_watermark('hand', 0)")
    second.execute("set lock_timeout = 50")
    with pytest.raises(Exception, match="lock timeout"):
        second.execute("select pubsub.lock_watermark('hand', 0)")
    first.commit()
    second.execute("select pubsub.lock_watermark('hand', 0)")


def test_polling_by_hand_gives_each_commit_once(connect):
    connection = connect()
    connection.execute("select pubsub.lock_watermark('hand', 0)")
    expected = commits(connection, 5)
    got = []
    while rows := connection.execute("select id from pubsub.poll('hand', 0, 2)").fetchall():
        got += [row[0] for row in rows]
    assert got == expected


def test_polling_in_a_transaction_that_wrote_is_refused(connect):
    connection = connect()
    with pytest.raises(Exception, match="already written"), connection.transaction():
        commits(connection)
        connection.execute("select pubsub.lock_watermark('hand', 0)")
        connection.execute("select * from pubsub.poll('hand', 0)")
