"""Costs that must not grow with faults, partitions or idle consumers: each figure beside the same one without them."""

from __future__ import annotations

import asyncio
import statistics

import psycopg
from psycopg import sql

from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.feeds.feed import Watched
from tests.benchmarks.measure import Report, cost_of, section
from tests.benchmarks.watch import milliseconds_a_feed

TABLES, FEEDS, FAULTS = 100, 50, 1_000_000
GOAL = 1.2
"""Times the cost without."""
NOTED = [
    f"insert into {fault} select {columns} from generate_series(1, %(each)s) as g, unnest(%(names)s::text[]) as n"
    for fault, columns in (
        ("revision.fault (tbl, commit_id, message)", "n::regclass, g, 'division by zero'"),
        ("mbus.fault (qname, consumer, message_id, message)", "'many', 'default', g, 'division by zero'"),
        ("tube.fault (tube, tbl, ids, message)", "'tube_' || n, n::regclass, 1, 'division by zero'"),
    )
]
"""Faults of commit queues, of selectors of message queues, and of tubes."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        faults(connection, conninfo, report)


def faults(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Rows that could not be captured, and messages on which a selector failed."""
    names = [f"table_{number}" for number in range(TABLES)]
    for name in names:
        connection.execute(sql.SQL("create table {} (id bigint primary key)").format(sql.Identifier(name)))
        connection.execute("select revision.track(%s)", [name])
        connection.execute("select tube.tube_ensure_exists(%s)", [f"tube_{name}"])
        connection.execute("select tube.tube_table_ensure_attached(%s, %s)", [f"tube_{name}", name])
    connection.execute("select mbus.create_queue('many', 16)")
    feeds: list[Watched] = [CommitFeed(f"idle {number}", 0) for number in range(FEEDS)]
    with section(f"{FAULTS:,} faults of {TABLES} tables / none"):
        before = costs(connection, conninfo, feeds)
        for noted in NOTED:
            connection.execute(noted, {"each": FAULTS // TABLES, "names": names})
        connection.execute("vacuum analyze")
        after = costs(connection, conninfo, feeds)
        for name, cost in before.items():
            report.say(f"{name}, none", cost, "ms CPU")
            report.say(name, after[name] / cost, "x", most=GOAL)


def costs(connection: psycopg.Connection, conninfo: str, feeds: list[Watched]) -> dict[str, float]:
    """Milliseconds of the server's CPU: a look at all feeds, `pgchange.status()`, and `pgchange.health()`."""
    return {
        "a look": asyncio.run(milliseconds_a_feed(conninfo, feeds)) * len(feeds),
        "status()": query_cost(connection, "select * from pgchange.status()"),
        "health()": query_cost(connection, "select * from pgchange.health()"),
    }


def query_cost(connection: psycopg.Connection, query: str, rounds: int = 5) -> float:
    def ask() -> None:
        connection.execute(query).fetchall()

    ask()
    return statistics.median(cost_of(connection, ask).cpu for _ in range(rounds)) * 1000
