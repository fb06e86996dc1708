"""The cost of the event log: publishing and consuming, compared with COPY and SELECT of the same rows and with
procrastinate; and dispatch."""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds import Batch, EventFeed
from airflow_pgchange.feeds.feed import partitions
from airflow_pgchange.feeds.queries import ask
from tests.benchmarks import procrastinate
from tests.benchmarks.measure import Report, cpu_of, ratio, section, side_by_side

PAYLOAD = json.dumps({"k": "x" * 980})
CASES = (
    (1000, 1000, 200_000, 0.55, 0.55),
    (100, 1000, 100_000, 0.55, 0.55),
    (100, 100, 50_000, 0.3, 0.55),
)
"""Cases: events in a transaction of the publisher, maximum of a batch of the consumer, events in all, and two goals.

The first goal is for the feed, whose claim and ack are durable commits. The second goal is for the cursor.
"""
DISPATCHED, CHUNKS = 10_000, 5
TOPICAL = "s.params @> jsonb_build_object('topic', e.topic)"
COLUMNS = "topic varchar(255) not null, payload jsonb not null, metadata jsonb not null default '{}'"
ROWS_A_PAGE = 7
JOBS = 1000
"""The number of procrastinate's jobs. Its worker takes each job by itself, and these are enough for a rate."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        procrastinate.install(conninfo)
        together(connection, conninfo, report)
        for groups, goal in ((10, None), (1000, 4.5)):
            dispatch(connection, groups, goal, report)


def copied_in(connection: psycopg.Connection[Any], table: str, batch: int, events: int) -> None:
    """Copy this number of events into a table, a batch in each transaction."""
    data = f"t\t{PAYLOAD}\n".encode() * batch
    with connection.cursor() as cursor:
        for _ in range(events // batch):
            with cursor.copy(f"copy {table} (topic, payload) from stdin") as copy:
                copy.write(data)


def rows_of(connection: psycopg.Connection[Any], query: str) -> int:
    """Read all rows of a query, and return their number."""
    with connection.cursor() as cursor:
        with cursor.copy(f"copy ({query}) to stdout") as copy:
            deque(copy, maxlen=0)
        return cursor.rowcount


def publisher(conninfo: str, table: str, batch: int, events: int) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        copied_in(connection, table, batch, events)


def together(connection: psycopg.Connection[Any], conninfo: str, report: Report) -> None:
    """Return the events a second if one publisher and one consumer work at the same time, until both have finished."""
    connection.execute(f"create table plain (id varchar(24), {COLUMNS}, subscription_id varchar(24))")
    connection.execute("create table filled (like plain including all)")
    connection.execute("insert into pgmb.subscriptions (group_id) values ('bench')")

    def plain(size: int, limit: int, events: int) -> float:
        connection.execute("truncate plain, filled")
        copied_in(connection, "filled", 1000, events)
        return beside("plain", size, events, lambda: selected(conninfo, limit))

    def ours(consume: Callable[[str, int, int], int], size: int, limit: int, events: int) -> float:
        connection.execute("truncate pgmb.events, pgmb.published, pgmb.dispatched")
        return beside("pgmb.events", size, events, lambda: consume(conninfo, limit, events))

    def beside(table: str, size: int, events: int, consume: Callable[[], int]) -> float:
        writer = get_context("fork").Process(target=publisher, args=(conninfo, table, size, events))
        connection.execute("checkpoint")
        began = time.perf_counter()
        writer.start()
        found = consume()
        writer.join()
        if found != events:
            raise SystemExit(f"{found} rows were read, not {events}")
        return events / (time.perf_counter() - began)

    for size, limit, events, goal, goal_by_cursor in CASES:
        with section(f"1 kB, {size:,} published a transaction, up to {limit:,} consumed a batch, at once"):
            ours(by_feed, size, limit, events)
            bare, feed, cursor, jobs = side_by_side(
                9,
                partial(plain, size, limit, events),
                partial(ours, by_feed, size, limit, events),
                partial(ours, by_cursor, size, limit, events),
                partial(procrastinate.together, conninfo, PAYLOAD, size, JOBS),
            )
            report.say("COPY and SELECT", statistics.median(bare), "events/s")
            report.say("event log, EventFeed", statistics.median(feed), "events/s")
            report.say(
                "event log, read_next_events and set_group_cursor", statistics.median(cursor), "events/s"
            )
            report.say("procrastinate, its worker takes one by one", statistics.median(jobs), "jobs/s")
            report.say("EventFeed / COPY and SELECT", ratio(feed, bare), "x", least=goal)
            report.say("by cursor / COPY and SELECT", ratio(cursor, bare), "x", least=goal_by_cursor)
            report.say("EventFeed / procrastinate", ratio(feed, jobs), "x")
    connection.execute("delete from pgmb.subscription_groups")


def selected(conninfo: str, limit: int) -> int:
    found, page, step = 0, 0, limit // ROWS_A_PAGE
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while rows := rows_of(
            connection, f"select * from filled where ctid >= '({page},0)' and ctid < '({page + step},0)'"
        ):
            found, page = found + rows, page + step
    return found


def by_feed(conninfo: str, limit: int, events: int) -> int:
    """The steps of a consumer transaction, on connections that are kept open."""
    feed, found = EventFeed("bench"), 0
    with (
        psycopg.connect(conninfo, autocommit=True, prepare_threshold=None) as keeper,
        psycopg.connect(conninfo, autocommit=True, prepare_threshold=None) as claims,
    ):
        begin = sql.SQL("; ").join([sql.SQL("begin"), feed.lock(), feed.position()])
        while found < events:
            cursor = keeper.execute(begin)
            cursor.nextset()
            cursor.nextset()
            (position,) = next(cursor)
            claimed = ask(claims, feed.claim(position, limit, None, None))
            if claimed is None:
                keeper.execute("rollback")
                time.sleep(0.001)
                continue
            taken: Batch = Batch.from_json({**claimed, "feed": feed.name})
            for part in partitions(feed, taken, 1):
                found += rows_of(claims, part.query)
            keeper.execute(sql.SQL("; ").join([feed.ack(taken), sql.SQL("commit")]))
    return found


def by_cursor(conninfo: str, limit: int, events: int) -> int:
    """Read the events as a task does that holds a group for its handlers, or as a reader by SQL does."""
    found, query = 0, f"select * from pgmb.read_next_events('bench', null, {limit}, peek => true)"
    with psycopg.connect(conninfo, autocommit=True, prepare_threshold=None) as connection:
        connection.execute("select pg_advisory_lock(pgmb.lock_key('bench'))")
        while found < events:
            with connection.cursor() as cursor:
                with cursor.copy(f"copy ({query}) to stdout") as copy:
                    last = deque(copy, maxlen=1)
                if not last:
                    if cursor.execute("select pgmb.poll_for_events()").fetchone() == (0,):
                        time.sleep(0.001)
                    continue
                found += cursor.rowcount
                cursor.execute(
                    "select pgmb.set_group_cursor('bench', %s)", [bytes(last[0]).split()[-1].decode()]
                )
    return found


def dispatch(connection: psycopg.Connection[Any], groups: int, goal: float | None, report: Report) -> None:
    """Report the CPU time to dispatch events, each to one of ``groups`` groups with the same condition."""
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql, params) "
        "select 'g' || g, %s, jsonb_build_object('topic', 't' || g) from generate_series(1, %s::int) as g",
        [TOPICAL, groups],
    )
    spent = []
    for _ in range(CHUNKS):
        for _ in range(10):
            connection.execute(
                "insert into pgmb.events (topic, payload) select 't' || 1 + g %% %s, %s "
                "from generate_series(1, %s::int) as g",
                [groups, PAYLOAD, DISPATCHED // 10],
            )
        spent.append(
            cpu_of(connection, lambda: connection.execute("select pgmb.dispatch()")) / DISPATCHED * 1e6
        )
    with section(f"dispatch to {groups:,} groups, CPU of the backend"):
        report.say("an event", sorted(spent)[len(spent) // 2], "us", most=goal)
    connection.execute("delete from pgmb.subscription_groups")
