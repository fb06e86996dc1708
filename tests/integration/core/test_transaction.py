"""The consumer transaction: its locks, the failures that it survives, and those that it detects."""

from __future__ import annotations

import signal
import threading
import time

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.admin import consumers, manual_operations, schema
from airflow_pgchange.errors import (
    BatchGivenUp,
    BatchIncomplete,
    BatchNotFinished,
    ConnectionLost,
    ServerUnavailable,
    Stopped,
    UnknownBranch,
)
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, queries, transaction
from airflow_pgchange.feeds.connections import complete
from airflow_pgchange.feeds.connections import connect as feed_connect
from tests.commits import FEED, claim_and_fail, commits, drain
from tests.waiting import locks, until

WAITING = """
select count(*) = 2 from pg_stat_activity
where datname = current_database() and state = 'idle in transaction' and application_name = 'airflow_pgchange'
"""
"""A transaction that works, and a transaction that waits."""


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_a_consumer_that_waited_for_the_lock_sees_the_commits_of_its_holder(db, connect, level):
    connection = connect()
    connection.execute(
        f"alter database {connection.info.dbname} set default_transaction_isolation = '{level}'"
    )
    commits(connection, 3)
    found = []

    def wait_and_claim():
        with ConsumerTransaction(FEED, db, busy_timeout=None) as second:
            found.append(second.claim(10))

    waiting = threading.Thread(target=wait_and_claim)
    with ConsumerTransaction(FEED, db) as first:
        first.claim(10)
        waiting.start()
        until(connection, WAITING)
        first.ack()
    waiting.join()
    assert found == [None]


def test_time_after_a_claim_counts_as_the_phase_process(db, connect):
    commits(connect(), 3)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        assert list(consumer.progress.seconds)[-2:] == ["claim", "process"]
        consumer.ack()


def test_a_transaction_can_be_used_after_its_position_could_not_be_read(db, connect, monkeypatch):
    commits(connect(), 3)
    with ConsumerTransaction(FEED, db) as consumer:
        with monkeypatch.context() as broken, pytest.raises(errors.DivisionByZero):
            broken.setattr(CommitFeed, "position", lambda self: sql.SQL("select 1 / 0"))
            consumer.claim(10)
        assert consumer.claim(10).count == 3
        consumer.ack()


def test_a_connection_that_is_lost_while_another_holds_the_lock_is_told_as_that(db, connect, monkeypatch):
    commits(connect(), 3)

    def ask_and_lose(connection, *asked):
        values = queries.ask_each(connection, *asked)
        if FEED.lock() in asked and not values[-1]:
            connection.pgconn.finish()
        return values

    with ConsumerTransaction(FEED, db) as first:
        first.claim(10)
        monkeypatch.setattr(transaction, "ask_each", ask_and_lose)
        with (
            pytest.raises(ServerUnavailable, match="the connection is closed"),
            ConsumerTransaction(FEED, db),
        ):
            raise AssertionError("it cannot have begun")
        first.ack()


def test_a_consumer_that_waits_for_the_lock_holds_no_snapshot_and_can_be_stopped(db, connect):
    connection, stopped, ended = connect(), threading.Event(), []

    def wait():
        with pytest.raises(Stopped):
            ConsumerTransaction(FEED, db, busy_timeout=None, stopped=stopped.is_set).__enter__()
        ended.append(True)

    waiting = threading.Thread(target=wait)
    with ConsumerTransaction(FEED, db):
        waiting.start()
        until(connection, WAITING)
        until(
            connection,
            "select every(backend_xmin is null) from pg_stat_activity where application_name = 'airflow_pgchange' "
            "and datname = current_database()",
        )
        stopped.set()
        waiting.join()
    assert ended == [True]


def test_a_consumer_that_is_stopped_before_the_commit_keeps_nothing(db, connect):
    connection = connect()
    rows = commits(connection, 3)
    connection.execute("create table kept (id int)")
    with pytest.raises(Stopped), ConsumerTransaction(FEED, db, stopped=lambda: True) as consumer:
        consumer.claim(10)
        consumer.ack(lambda c: c.execute("insert into kept values (1)"))
    assert connection.execute("select count(*) from kept").fetchone() == (0,)
    assert drain(db) == rows


def test_changes_that_are_not_read_to_their_end_hold_nothing_up(db, connect):
    rows = commits(connect(), 3)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        first = consumer.changes()
        assert next(first).id == rows[0]
        second = consumer.changes()
        assert next(second).id == rows[0]
        consumer.ack()
    assert drain(db) == []


def test_a_failure_in_the_middle_of_the_changes_ends_the_transaction(db, connect):
    rows = commits(connect(), 3)
    kept = []
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        kept.append(consumer.changes())
        raise ZeroDivisionError(next(kept[0]))
    assert drain(db) == rows


def test_a_rollback_that_a_writer_asks_for_is_no_ack(db, connect):
    rows = commits(connect(), 3)

    def give_up(_):
        raise psycopg.Rollback

    with pytest.raises(BatchNotFinished), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        consumer.ack(give_up)
    assert drain(db) == rows


class TimedOut(Exception):
    """Raise an exception in a signal handler, in the middle of a statement."""


def test_a_statement_that_an_exception_from_outside_leaves_running_is_cancelled(db, connect):
    rows, connection = commits(connect(), 1), connect()

    def time_out(*_):
        raise TimedOut

    before = signal.signal(signal.SIGALRM, time_out)
    try:
        with pytest.raises(TimedOut), ConsumerTransaction(FEED, db) as consumer:
            consumer.claim(10)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            consumer.ack(lambda c: c.execute("select pg_sleep(120)"))
    finally:
        signal.signal(signal.SIGALRM, before)
    until(
        connection,
        "select not exists (select from pg_stat_activity where query like 'select pg_sleep(120)%' "
        "and state = 'active' and datname = current_database() and pid <> pg_backend_pid())",
        20,
    )
    assert drain(db) == rows


def test_a_branch_that_does_not_exist_leaves_no_consumer_behind(db, connect):
    with pytest.raises(UnknownBranch), ConsumerTransaction(CommitFeed("slip", 99), db):
        pass
    assert connect().execute("select count(*) from pubsub.watermark").fetchone() == (0,)


def test_a_database_without_an_encoding_is_read_as_text(cluster, connect_to):
    with psycopg.connect(cluster.conninfo(), autocommit=True) as admin:
        admin.execute(
            "create database plain encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C' template template0"
        )
    try:
        connection = feed_connect(cluster.conninfo("plain"))
        assert all(state.intact for state in schema.install(connection, ["pubsub"]))
        connection.execute("select pubsub.register('plain', 0)")
        assert consumers.status(connection)[0]["consumer"] == "commits:plain/0"
        connection.close()
    finally:
        with psycopg.connect(cluster.conninfo(), autocommit=True) as admin:
            admin.execute("drop database plain with (force)")


def test_a_batch_that_may_not_be_tried_again_is_refused_without_counting(db, connect):
    commits(connect(), 1)
    claim_and_fail(db)
    for _ in range(3):
        with (
            pytest.raises(BatchGivenUp, match="has failed, at attempt 1"),
            ConsumerTransaction(FEED, db) as consumer,
        ):
            consumer.claim(10, max_attempts=1)
    with ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(10, max_attempts=2)
        assert batch.attempt == 2
        consumer.ack()


def test_a_batch_in_work_locks_no_relation_for_anybody(db, connect):
    connection = connect()
    commits(connection, 3)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        list(consumer.changes())
        consumer.ping()
        kinds = {lock.kind for lock in locks(connection, application="airflow_pgchange")}
        assert kinds == {"advisory", "virtualxid"}
        with connection.transaction():
            connection.execute("set local lock_timeout = '1s'")
            connection.execute(
                "lock table revision.commit_queue, pubsub.watermark, pgchange.claim in access exclusive mode"
            )
        consumer.ack()


def test_no_connection_is_opened_while_the_lock_is_held(db, other_db, connect_to, monkeypatch):
    results = connect_to(db)
    commits(connect_to(other_db))
    locked = []
    original = transaction.connect

    def watched(*arguments, **options):
        locked.append(results.execute("select pubsub.locked('test', 0)").fetchone()[0])
        return original(*arguments, **options)

    monkeypatch.setattr(transaction, "connect", watched)
    assert len(drain(db, other_db)) == 1
    assert locked
    assert not any(locked)


@pytest.mark.parametrize(
    "setting", ["idle_in_transaction_session_timeout", "statement_timeout", "transaction_timeout"]
)
def test_a_batch_outlives_every_timeout_of_the_server(db, connect, setting):
    connection = connect()
    commits(connection)
    known = connection.execute(
        "select exists (select from pg_settings where name = %s)", [setting]
    ).fetchone()[0]
    if known:
        connection.execute(f"alter database {connection.info.dbname} set {setting} = '200ms'")
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        idle = setting == "idle_in_transaction_session_timeout"
        (connection if idle else consumer.connection).execute("select pg_sleep(0.5)")
        consumer.ack()
    connection.execute("set statement_timeout = 0")
    assert connection.execute("select version from pubsub.watermark").fetchone() == (1,)


def test_nothing_of_our_settings_stays_with_the_pooler(db, connect, connect_to, pgbouncer):
    connection = connect()
    commits(connection)
    settings = ["idle_in_transaction_session_timeout", "statement_timeout", "lock_timeout"]
    for setting in settings:
        connection.execute(f"alter database {connection.info.dbname} set {setting} = '1h'")
    # End the server connections that the pooler opened before that.
    connection.execute(
        "select pg_terminate_backend(pid, 10000) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()"
    )
    pooled = connect_to(pgbouncer)
    with ConsumerTransaction(FEED, pgbouncer, busy_timeout=1) as consumer:
        consumer.claim(10)
        consumer.ack()
    query = "select setting from pg_settings where name = any (%s) and setting <> reset_val"
    assert pooled.execute(query, [settings]).fetchall() == []


def test_dead_peers_are_noticed_and_what_a_person_says_wins():
    assert conninfo_to_dict(complete("dbname=x"))["keepalives"] == "1"
    assert conninfo_to_dict(complete("dbname=x keepalives=0"))["keepalives"] == "0"


def test_a_ping_tells_when_the_connection_is_gone(db, connect):
    connection = connect()
    commits(connection)
    lost = threading.Event()
    with pytest.raises(ConnectionLost), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        with consumer.kept_alive(lost.set, poll_interval=0.01):
            connection.execute("select pg_terminate_backend(%s)", [consumer.connection.info.backend_pid])
            lost.wait(30)
    assert lost.is_set()
    assert len(drain(db)) == 1


def test_a_batch_that_ends_well_is_not_told_that_its_connection_is_gone(db, connect):
    commits(connect())
    lost = threading.Event()
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        with consumer.kept_alive(lost.set, poll_interval=0.01):
            time.sleep(0)
        consumer.ack()
    assert not lost.is_set()


@pytest.mark.parametrize("deadlocks", [1, 4, 5])
def test_results_and_progress_are_written_again_after_a_deadlock(db, connect, deadlocks):
    connection = connect()
    connection.execute("create table result (attempt bigint)")
    expected = commits(connection)
    tries = []

    def write(target):
        tries.append(None)
        target.execute("insert into result values (%s)", [len(tries)])
        if len(tries) <= deadlocks:
            target.execute("do $$ begin raise exception using errcode = 'deadlock_detected'; end $$")

    def process():
        with ConsumerTransaction(FEED, db) as consumer:
            consumer.claim(10)
            consumer.ack(write)

    if deadlocks < 5:
        process()
        assert connection.execute("select attempt from result").fetchall() == [(deadlocks + 1,)]
        assert drain(db) == []
    else:
        with pytest.raises(errors.DeadlockDetected):
            process()
        assert connection.execute("select attempt from result").fetchall() == []
        assert drain(db) == expected


def test_the_lock_has_all_64_bits_and_a_collision_only_means_busy(db, connect):
    connection = connect()
    connection.execute("insert into revision.branch (id, type) overriding system value values (1, 'stable')")
    keys = connection.execute(
        "select pubsub.lock_key('consumer ' || n, b) from generate_series(1, 50) as n, generate_series(0, 9) as b"
    ).fetchall()
    assert len(set(keys)) == 500
    assert sum(1 for (key,) in keys if not -(2**31) <= key < 2**31) > 490
    connection.execute("select pg_advisory_lock(pubsub.lock_key('test', 0))")
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.busy
    with ConsumerTransaction(CommitFeed("test", 1), db) as consumer:
        assert not consumer.busy


def test_a_second_batch_needs_a_second_transaction(db, connect):
    expected = commits(connect(), 2)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        consumer.ack()
        with pytest.raises(BatchNotFinished, match="a transaction has one batch"):
            consumer.claim(1)
    assert drain(db) == expected[1:]


@pytest.mark.parametrize("call", ["pubsub.claim('test', 0, '{}', 1)", "pubsub.poll('test', 0)"])
def test_by_hand_too_a_transaction_that_has_written_cannot_claim(db, connect, call):
    connection = connect()
    connection.execute("select pubsub.lock_watermark('test', 0)")
    with pytest.raises(errors.Error, match="already written") as refused, connection.transaction():
        own = commits(connection)
        connection.execute(f"select {call}")
    assert refused.value.sqlstate == "PC007"
    assert own
    expected = commits(connection)
    assert drain(db) == expected


def test_a_batch_claimed_before_the_consumer_was_moved_cannot_be_acked(db, connect):
    connection = connect()
    expected = commits(connection, 2)
    drain(db, limit=1)
    manual_operations.move_consumer(connection, connection, FEED, "beginning")
    batch = claim_and_fail(db)
    manual_operations.move_consumer(connection, connection, FEED, "now")
    with pytest.raises(errors.Error, match="not where batch") as refused:
        connection.execute(FEED.ack(batch))
    assert refused.value.sqlstate == "PC006"
    manual_operations.move_consumer(connection, connection, FEED, "beginning")
    assert drain(db) == expected


def test_an_advisory_lock_of_two_numbers_is_nobody_at_work(connect):
    other = connect()
    other.execute("select pg_advisory_lock(1, 2)")
    assert connect().execute("select pgchange.locked((1::bigint << 32) + 2)").fetchone() == (False,)


def test_a_batch_of_which_a_change_is_gone_fails_where_it_is_read(db, connect):
    connection = connect()
    expected = commits(connection, 3)
    told = pytest.raises(BatchIncomplete, match="has 3 changes, its reader found 2")
    with told, ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        connection.execute("delete from revision.commit_queue where commit_id = %s", [expected[1]])
        list(consumer.changes())
    assert connection.execute("select version from pubsub.watermark").fetchone() == (0,)
