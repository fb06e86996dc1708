"""The lag of many consumers of the commit queue, in one query."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from psycopg import sql

from airflow_pgchange.errors import SourceLostTail, UnknownBranch
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.feed import NOWHERE, lags
from airflow_pgchange.feeds.queries import ask
from tests.benchmarks.measure import backend_cpu
from tests.commits import commits, drain, narrow_partitions, use_up_transactions
from tests.ledger import Connect

READ = """
    select sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) from pg_stat_xact_all_tables where schemaname = 'revision'
"""
EARLY, IN_ORDER = CommitFeed("early", 0), CommitFeed("in order", 0, in_order=True)


def told(connection: psycopg.Connection[Any], *feeds: CommitFeed) -> list[dict[str, Any]]:
    """Return the lag of each consumer at its position, by one query."""
    found: list[dict[str, Any]] = ask(
        connection, lags([(feed, ask(connection, feed.position()) or NOWHERE, 10) for feed in feeds])
    )
    return found


def cost(connection: psycopg.Connection[Any], queries: Sequence[sql.Composed]) -> float:
    """Return the CPU seconds that the server's backend takes for the queries, which are sent in one round trip."""
    asked, costs = sql.SQL("; ").join(queries), []
    for _ in range(7):
        before = backend_cpu(connection)
        connection.execute(asked)
        costs.append(backend_cpu(connection) - before)
    return statistics.median(costs)


def read(connection: psycopg.Connection[Any], query: sql.Composed) -> int:
    """Return the number of rows of the queue, and of its other tables, that a query reads."""
    before = ask(connection, READ)
    connection.execute(query)
    return int(ask(connection, READ) - before)


def test_each_is_told_from_where_it_is(db: str, connect: Connect) -> None:
    connection = connect()
    commits(connection, 3)
    with ConsumerTransaction(EARLY, db) as consumer:
        consumer.claim(2)
        consumer.ack()
    assert [lag["ready"] for lag in told(connection, CommitFeed("new", 0), EARLY)] == [3, 1]


def test_only_who_reads_in_order_waits_for_an_older_transaction(connect: Connect) -> None:
    connection, older = connect(), connect(autocommit=False)
    older.execute("select pg_current_xact_id()")
    commits(connection, 1)
    found = [(lag["ready"], lag["waiting"]) for lag in told(connection, EARLY, IN_ORDER)]
    assert found == [(1, 0), (0, 1)]


def test_for_who_does_not_read_in_order_nothing_is_read_that_waits(connect: Connect) -> None:
    connection, older = connect(), connect(autocommit=False)
    older.execute("select pg_current_xact_id()")
    commits(connection, 100)
    with connection.transaction():
        one, many = EARLY.lag(NOWHERE, 1000), lags([(EARLY, NOWHERE, 1000)])
        assert read(connection, many) == read(connection, one) >= 100


def test_a_mistyped_branch_is_refused_and_named(connect: Connect) -> None:
    with pytest.raises(UnknownBranch, match="999"):
        told(connect(), EARLY, CommitFeed("early", 999))


def test_a_position_ahead_of_its_source_is_refused_and_named(connect: Connect) -> None:
    ahead = {"consumer": "early", "version": 7, "snapshot": "1:1:", "source": None}
    with pytest.raises(SourceLostTail, match="commits:early/0"):
        ask(connect(), lags([(IN_ORDER, NOWHERE, 1), (EARLY, ahead, 1)]))


def test_a_look_at_many_costs_a_third_of_looks_at_each(connect: Connect) -> None:
    """Measure the backend's CPU time, because it does not depend on the load of the machine."""
    connection = connect()
    asked = [(CommitFeed(f"watched {number}", 0), NOWHERE, 1) for number in range(100)]
    assert (
        cost(connection, [lags(asked)])
        < cost(connection, [feed.lag(at, upto) for feed, at, upto in asked]) / 3
    )


def maintained(connection: psycopg.Connection[Any]) -> int:
    """Begin the next partition, run maintenance, and return the number of gaps that are recorded for trunk."""
    use_up_transactions(connection)
    connection.execute("select revision.maintain_partitions(50)")
    return int(ask(connection, "select count(*) from revision.gap where branch_id = 0"))


def test_no_commit_of_a_late_transaction_is_stepped_over(db: str, connect: Connect) -> None:
    """A transaction that was open at a position is read although gaps were recorded before and after the position."""
    connection, late, later = connect(), connect(autocommit=False), connect(autocommit=False)
    narrow_partitions(connection)
    for writer in (late, later):
        writer.execute("select pg_current_xact_id()")
    commits(connection, 1)
    assert len(drain(db, feed=EARLY)) == 1
    commits(late, 2)
    late.commit()
    maintained(connection)
    assert [lag["ready"] for lag in told(connection, EARLY)] == [2]
    assert len(drain(db, feed=EARLY)) == 2
    commits(later, 3)
    maintained(connection)
    later.commit()
    maintained(connection)
    assert [lag["ready"] for lag in told(connection, EARLY, CommitFeed("new", 0))] == [3, 6]
    assert len(drain(db, feed=EARLY)) == 3


def test_the_partitions_that_an_idle_consumer_has_behind_it_are_not_planned(
    db: str, connect: Connect
) -> None:
    connection = connect()
    narrow_partitions(connection)
    commits(connection, 2)
    drain(db, feed=EARLY)
    for _ in range(4):
        maintained(connection)
        connection.execute("insert into revision.commit_queue (commit_id, branch_id) values (1, 1)")
    assert maintained(connection) == 2
    other = connect()
    locked = """
        select count(*) from pg_locks
        where pid = pg_backend_pid() and relation = any (array(select relid from revision.partitions()))
    """
    with other.transaction():
        assert [lag["ready"] for lag in told(other, EARLY)] == [0]
        # The locked tables are the current partition and the partitions that were created ahead.
        assert ask(other, locked) <= 4
    commits(connection, 1)
    assert [lag["ready"] for lag in told(connection, EARLY)] == [1]


def test_a_gap_of_whole_partitions_is_kept_for_who_stands_before_it(db: str, connect: Connect) -> None:
    connection = connect()
    narrow_partitions(connection)
    commits(connection, 2)
    drain(db, feed=EARLY)
    for _ in range(3):
        maintained(connection)
    commits(connection, 3)
    # A gap before the first commit, a gap of whole partitions, and a gap after the last commit.
    assert [maintained(connection) for _ in range(2)] == [3, 3]
    assert [lag["ready"] for lag in told(connection, EARLY, CommitFeed("new", 0))] == [3, 5]
    assert len(drain(db, feed=EARLY)) == 3
