"""Costs that must not grow with faults, partitions or idle consumers: each figure with and without them."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
from psycopg import sql

from airflow_pgchange.admin import maintain
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.feeds.feed import Watched
from tests.benchmarks.measure import Report, cost_of, section
from tests.benchmarks.watch import milliseconds_a_feed

TABLES, FEEDS, FAULTS = 100, 50, 1_000_000
GOAL = 1.2
"""The goal: the maximum cost with the faults or idle consumers, as a multiple of the cost without them."""
CONSUMERS, FEW, MANY = 20, 5_000, 100_000
"""The number of consumers of a message queue, and the sizes of a small and of a large backlog."""
LONGEST = 1
"""The goal: the maximum duration of a transaction of maintenance in seconds."""
WIDTH, PACE, RUNS = 2_000, 1, 6
"""Transaction ids in a partition, seconds between two runs of maintenance, and the number of runs.

In production a partition has a million ids, and maintenance runs every ten minutes.
"""
NOTED = [
    f"insert into {fault} select {columns} from generate_series(1, %(each)s) as g, unnest(%(names)s::text[]) as n"
    for fault, columns in (
        ("revision.fault (tbl, commit_id, message)", "n::regclass, g, 'division by zero'"),
        ("mbus.fault (qname, consumer, message_id, message)", "'many', 'default', g, 'division by zero'"),
        ("tube.fault (tube, tbl, ids, message)", "'tube_' || n, n::regclass, 1, 'division by zero'"),
    )
]
"""Statements that insert faults: of commit queues, of selectors of message queues, and of tubes."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        faults(connection, conninfo, report)
        backlogs(connection, report)
        partitions(connection, conninfo, report)


def faults(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Measure rows that could not be captured, and messages on which a selector failed."""
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
    """Return the milliseconds of CPU of a watcher's check of all feeds, of `pgchange.status()`, and of
    `pgchange.health()`."""
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


def backlogs(connection: psycopg.Connection, report: Report) -> None:
    """Measure maintenance of a message queue beside a backlog that nobody has received, and with many messages to
    delete."""
    connection.execute("select mbus.create_queue('backlog', 4)")
    consumers = ["default", *(f"reader_{number}" for number in range(1, CONSUMERS))]
    for name in consumers[1:]:
        connection.execute("select mbus.create_consumer(%s, 'backlog')", [name])
    with section(f"maintenance of {CONSUMERS} consumers' messages: {MANY:,} / {FEW:,}"):
        post = "select mbus.postn_backlog(array_fill('n=>1'::hstore, array[%s]))"
        connection.execute(post, [FEW])
        connection.execute("vacuum analyze")
        few = query_cost(connection, "select mbus.maintain_queue('backlog')")
        connection.execute(post, [MANY - FEW])
        connection.execute("vacuum analyze")
        report.say("that nobody has received, few", few, "ms CPU")
        many = query_cost(connection, "select mbus.maintain_queue('backlog')")
        report.say("that nobody has received", many / few, "x", most=GOAL)
        for name in consumers:
            while connection.execute(
                f"select count(*) from mbus.consumen_backlog_by_{name}(10000)"
            ).fetchone() != (0,):
                pass
        taken = []
        while True:
            began = time.perf_counter()
            (deleted,) = connection.execute("select mbus.maintain_queue('backlog')").fetchone() or (0,)
            taken.append(time.perf_counter() - began)
            if not deleted:
                break
        report.say("the longest transaction that deletes what all received", max(taken), "s", most=LONGEST)


def partitions(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Measure partitions of the commit queue while many transactions write, and a default partition with many rows."""
    for (partition,) in connection.execute("select relid from revision.partitions()").fetchall():
        connection.execute(f"drop table {partition}")
    connection.execute("truncate revision.pace, revision.commit_queue")
    with (
        section(f"{RUNS} runs of maintenance beside writers, and partitions of {WIDTH:,} transactions"),
        writers(conninfo) as waited,
    ):
        for _ in range(RUNS):
            time.sleep(PACE)
            # The rate is computed from runs that are half a minute apart. Here one second stands for that time.
            connection.execute("update revision.pace set at = at - interval '30 seconds'")
            lines = maintain(connection, width=WIDTH).done
        before = in_default(connection)
        postponed = sum(line.startswith("postponed partitions") for line in lines)
        time.sleep(PACE)
        report.say(
            "rows that came to the default partition in the last run",
            in_default(connection) - before,
            "",
            most=0,
        )
        report.say("postponed in the last run", postponed, "", most=0)
        report.say("the longest that a writer waited", max(waited), "s", most=LONGEST)


def in_default(connection: psycopg.Connection) -> int:
    (rows,) = connection.execute("select count(*) from revision.commit_queue_default").fetchone() or (0,)
    return int(rows)


@contextmanager
def writers(conninfo: str, count: int = 4) -> Iterator[list[float]]:
    """Run sessions that write one commit after another while the block runs. Yield the times that they waited."""
    waited, ended = [0.0], threading.Event()

    def write() -> None:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            while not ended.is_set():
                began = time.perf_counter()
                connection.execute("insert into revision.commit_queue (commit_id, branch_id) values (1, 0)")
                waited.append(time.perf_counter() - began)

    with ThreadPoolExecutor(count) as pool:
        writing = [pool.submit(write) for _ in range(count)]
        try:
            yield waited
        finally:
            ended.set()
        for each in writing:
            each.result()
