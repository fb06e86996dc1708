"""Rows that existed before the tracking began: each comes once, no matter which transactions were open before, during and
after."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_pgchange.feeds import CommitFeed
from tests.commits import drain, narrow_partitions, use_up_transactions
from tests.tubes import one
from tests.waiting import until, waits

OPEN = {
    "a transaction": ["select pg_current_xact_id()"],
    "one with a savepoint": [
        "select pg_current_xact_id()",
        "savepoint s",
        "insert into revision.commit default values",
    ],
    "one that has only looked": ["select 1"],
}
"""By name: the statements of a transaction that begins before the tracking and is still open."""
ENDS = {
    "committed": ["commit"],
    "prepared": ["prepare transaction 'late'", "commit prepared 'late'"],
}


@pytest.fixture
def ledger(connect):
    connection = connect()
    connection.execute("create table ledger (id bigint primary key, kind text not null default 'a')")
    connection.execute("insert into ledger select generate_series(10, 30, 10)")
    return connection


def enqueued(connection, table="ledger"):
    """Enqueue the existing rows, and return all commits of the table."""
    connection.execute(f"call revision.enqueue_existing('{table}', 2)")
    branch = one(connection, "select branch_id from revision.tracked where tbl = %s::regclass", table)
    query = "select commit_id from revision.commit_queue where branch_id = %s order by commit_id"
    return [row[0] for row in connection.execute(query, [branch]).fetchall()]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_rows_of_transactions_that_began_before_the_tracking_come_once(connect, end):
    connection = connect()
    late = {name: connect() for name in OPEN}
    for name, statements in OPEN.items():
        for statement in ["begin", *statements]:
            late[name].execute(statement)
    connection.execute("create table ledger (id bigint primary key)")
    connection.execute("insert into ledger select generate_series(100, 300, 100)")
    connection.execute("select revision.track('ledger')")
    expected = [100, 200, 300]
    for number, session in enumerate(late.values()):
        session.execute("insert into ledger values (%s), (%s)", [150 + number, 400 + number])
        expected += [150 + number, 400 + number]
    for number, session in enumerate(late.values()):
        for statement in end:
            session.execute(statement.replace("late", f"late {number}"))
    assert enqueued(connection) == sorted(expected)


def test_rows_that_are_inserted_while_existing_rows_are_enqueued_come_once(connect, ledger):
    late = connect(autocommit=False)
    late.execute("select pg_current_xact_id()")
    ledger.execute("select revision.track('ledger')")
    late.execute("insert into ledger values (15), (25)")
    ledger.execute("select revision.enqueue_chunk('ledger', 2)")
    late.commit()
    ledger.execute("insert into ledger values (28)")
    assert enqueued(ledger) == [10, 15, 20, 25, 28, 30]


def test_of_two_that_enqueue_the_rows_from_before_at_once_each_takes_others(connect, ledger):
    first, second = connect(autocommit=False), connect()
    ledger.execute("select revision.track('ledger')")
    first.execute("select revision.enqueue_chunk('ledger', 2)")
    with ThreadPoolExecutor() as pool:
        chunk = pool.submit(second.execute, "select revision.enqueue_chunk('ledger', 2)")
        until(ledger, waits(second, behind=first))
        first.commit()
        chunk.result()
    assert enqueued(ledger) == [10, 20, 30]


def test_rows_that_were_captured_and_then_updated_come_once(ledger):
    ledger.execute("select revision.track('ledger')")
    ledger.execute("insert into ledger values (15)")
    ledger.execute("update ledger set kind = 'b'")
    assert enqueued(ledger) == [10, 15, 20, 30]


def test_a_fault_that_names_no_row_leaves_no_row_in_doubt_out(ledger):
    ledger.execute("select revision.track('ledger')")
    ledger.execute(
        "insert into revision.fault (tbl, message) values ('ledger', 'the key column was dropped')"
    )
    ledger.execute("update ledger set kind = 'b'")
    assert enqueued(ledger) == [10, 20, 30]


def test_another_tables_commits_are_not_taken_for_the_tables_own(ledger):
    ledger.execute("create table other (id bigint primary key)")
    ledger.execute("select revision.track('ledger'), revision.track('other')")
    ledger.execute("insert into other values (10), (20)")
    ledger.execute("update ledger set kind = 'b'")
    assert enqueued(ledger) == [10, 20, 30]


def test_rows_in_a_branch_that_other_tables_may_write_to_are_refused_where_they_are_in_doubt(ledger):
    ledger.execute("create table other (id bigint primary key)")
    for table in ("ledger", "other"):
        ledger.execute("select revision.track(%s, branch_id => '0 * id')", [table])
    ledger.execute("insert into other values (10)")
    ledger.execute("update ledger set kind = 'b'")
    with pytest.raises(psycopg.Error, match="may also have commits of other tables"):
        ledger.execute("call revision.enqueue_existing('ledger')")


def test_rows_that_the_tracking_transaction_inserts_come_once(connect):
    other, connection = connect(), connect()
    connection.execute("begin")
    connection.execute("create table ledger (id bigint primary key); insert into ledger values (1000)")
    other.execute("insert into revision.commit default values")
    connection.execute("select revision.track('ledger')")
    connection.execute("insert into ledger values (7), (8)")
    connection.execute("commit")
    assert enqueued(connection) == [7, 8, 1000]


def test_a_row_that_is_captured_while_a_chunk_is_enqueued_comes_once(connect, ledger):
    late, blocking = connect(autocommit=False), connect(autocommit=False)
    late.execute("select pg_current_xact_id()")
    ledger.execute("select revision.track('ledger')")
    late.execute("insert into ledger values (15)")
    blocking.execute("lock table revision.fault")
    with ThreadPoolExecutor() as pool, blocking:
        chunk = pool.submit(ledger.execute, "select revision.enqueue_chunk('ledger', 10)")
        until(late, waits(ledger, relation="revision.fault"))
        late.commit()
        blocking.rollback()
        chunk.result()
    assert enqueued(ledger) == [10, 15, 20, 30]


def test_a_fault_and_its_row_come_once(ledger):
    ledger.execute("alter table ledger add n integer not null default 1")
    ledger.execute("select revision.track('ledger', branch_id => '(777 / n)::bigint * 0')")
    ledger.execute("insert into ledger values (15, 'a', 0)")
    ledger.execute("call revision.enqueue_existing('ledger')")
    ledger.execute("update ledger set n = 1")
    ledger.execute("select revision.replay_faults('ledger')")
    query = "select commit_id from revision.commit_queue where branch_id = 0 order by 1"
    assert [row[0] for row in ledger.execute(query).fetchall()] == [10, 15, 20, 30]


def test_a_table_that_is_tracked_again_gives_only_what_was_not_captured_before(ledger):
    ledger.execute("select revision.track('ledger')")
    ledger.execute("insert into ledger values (15)")
    ledger.execute("select revision.untrack('ledger')")
    ledger.execute("insert into ledger values (17)")
    ledger.execute("select revision.track('ledger')")
    ledger.execute("insert into ledger values (19), (40)")
    assert enqueued(ledger) == [10, 15, 17, 19, 20, 30, 40]


def test_rows_that_the_snapshot_of_the_tracking_transaction_misses_come_once(connect, ledger):
    tracking = connect()
    tracking.execute("begin isolation level repeatable read")
    tracking.execute("select 1")
    tracking.execute("select count(*) from ledger")
    ledger.execute("insert into ledger values (40)")
    tracking.execute("select revision.track('ledger')")
    tracking.execute("commit")
    ledger.execute("insert into ledger values (50)")
    assert enqueued(ledger) == [10, 20, 30, 40, 50]


def test_rows_in_doubt_are_refused_once_the_history_that_would_tell_is_trimmed(db, ledger):
    narrow_partitions(ledger)
    own = one(ledger, "select revision.track('ledger')")
    ledger.execute("insert into ledger values (15)")
    use_up_transactions(ledger, 120)
    assert drain(db, feed=CommitFeed("c", own)) == [15]
    assert "trimmed 1" in str(ledger.execute("select pubsub.trim_commit_queue('0 s')").fetchall())
    with pytest.raises(psycopg.Error, match="the history that would show this was trimmed"):
        ledger.execute("call revision.enqueue_existing('ledger')")
