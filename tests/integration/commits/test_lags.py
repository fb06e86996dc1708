"""The lag of many consumers of the commit queue, asked in one query."""

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
from tests.commits import commits
from tests.ledger import Connect

READ = """
    select sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) from pg_stat_xact_all_tables where schemaname = 'revision'
"""
EARLY, IN_ORDER = CommitFeed("early", 0), CommitFeed("in order", 0, in_order=True)


def told(connection: psycopg.Connection[Any], *feeds: CommitFeed) -> list[dict[str, Any]]:
    """The lag of each from where it is, by one query."""
    found: list[dict[str, Any]] = ask(
        connection, lags([(feed, ask(connection, feed.position()) or NOWHERE, 10) for feed in feeds])
    )
    return found


def cost(connection: psycopg.Connection[Any], queries: Sequence[sql.Composed]) -> float:
    """CPU of the server's process for the queries in one round trip, in seconds."""
    asked, costs = sql.SQL("; ").join(queries), []
    for _ in range(7):
        before = backend_cpu(connection)
        connection.execute(asked)
        costs.append(backend_cpu(connection) - before)
    return statistics.median(costs)


def read(connection: psycopg.Connection[Any], query: sql.Composed) -> int:
    """How many rows of the queue and of what it needs a query reads."""
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


def test_one_that_is_ahead_of_its_source_is_refused_and_named(connect: Connect) -> None:
    ahead = {"consumer": "early", "version": 7, "snapshot": "1:1:", "source": None}
    with pytest.raises(SourceLostTail, match="commits:early/0"):
        ask(connect(), lags([(IN_ORDER, NOWHERE, 1), (EARLY, ahead, 1)]))


def test_a_look_at_many_costs_a_third_of_looks_at_each(connect: Connect) -> None:
    """By what the server's own process spends, whatever else the machine does."""
    connection = connect()
    asked = [(CommitFeed(f"watched {number}", 0), NOWHERE, 1) for number in range(100)]
    assert (
        cost(connection, [lags(asked)])
        < cost(connection, [feed.lag(at, upto) for feed, at, upto in asked]) / 3
    )
