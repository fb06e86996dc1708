"""The cost of the event log's maintenance for publishers, and of publishing a table's mutations for its writers."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Collection
from functools import partial
from typing import Any

import psycopg

from tests.benchmarks.flights import FLIGHT, written
from tests.benchmarks.measure import Report, ratio, section, side_by_side

STATEMENTS = {1: 2_000, 100: 200, 10_000: 2}
WRITERS, SECONDS, ROUNDS, BATCH = 2, 10, 5, 100
PUBLISH = (
    "insert into pgmb.events (topic, payload) "
    f"select 'load', jsonb_build_object('n', g, 'filler', repeat('x', 1000)) from generate_series(1, {BATCH}) as g"
)
SETTINGS = {
    "partition_interval": "2 seconds",
    "partition_retention_period": "4 seconds",
    "future_intervals_to_create": "20 seconds",
}
GOAL = 0.8
"""The goal: in their slowest second during maintenance, publishers must reach this share of the events of the median
second."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        # Measure maintenance first: the other benchmark's dirty pages would otherwise be written back beside its
        # fsyncs.
        upkeep(connection, conninfo, report)
        mutations(connection, report)


def upkeep(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Run maintenance beside publishers at full speed and a dispatcher.

    Partitions are two seconds long, so each run creates, empties and drops some.
    """
    for table in ("events", "dispatched"):
        connection.execute(f"truncate pgmb.{table}, pgmb.published")
        for (part,) in connection.execute(
            f"select partition_id::text from pgmb.get_partitions_and_bounds('pgmb.{table}'::regclass)"
        ).fetchall():
            connection.execute(f"drop table {part}")
    with connection.transaction():
        for name, value in SETTINGS.items():
            connection.execute("update pgmb.config set value = %s where id = %s", [value, name])
    maintain(connection)
    with section(f"{WRITERS} publishers of 1 kB by {BATCH}, slowest second / median second"):
        connection.execute("alter system set autovacuum = on")
        connection.execute("select pg_reload_conf()")
        done: list[str] = []
        never, once, always = side_by_side(
            ROUNDS,
            lambda: slowest(conninfo, frozenset(), done),
            lambda: slowest(conninfo, {SECONDS // 2}, done),
            lambda: slowest(conninfo, range(SECONDS), done),
        )
        report.say("no maintenance", statistics.median(never), "x")
        report.say("one run of maintenance", statistics.median(once), "x", least=GOAL)
        report.say("a run every second", statistics.median(always), "x")
        report.say("one run / none", ratio(once, never), "x")
        for what in ("added", "emptied", "dropped", "postponed"):
            report.say(f"partitions {what}", sum(what in line for line in done), "")


def slowest(conninfo: str, runs: Collection[int], told: list[str]) -> float:
    """Return the events of the slowest second as a share of the median second.

    Maintenance runs in the seconds ``runs``.
    """
    stop = multiprocessing.Event()
    counts = [multiprocessing.Array("q", SECONDS + 1) for _ in range(WRITERS)]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("truncate pgmb.events, pgmb.dispatched, pgmb.published")
        connection.execute("checkpoint")
        maintain(connection)
        began = time.time() + 1
        work = [
            multiprocessing.Process(target=publisher, args=(conninfo, began, count, stop)) for count in counts
        ]
        work.append(multiprocessing.Process(target=dispatcher, args=(conninfo, stop)))
        for process in work:
            process.start()
        for second in range(SECONDS):
            time.sleep(max(0, began + second - time.time()))
            if second in runs:
                told += maintain(connection)
        time.sleep(max(0, began + SECONDS - time.time()))
    stop.set()
    for process in work:
        process.join()
    seconds = [sum(count[n] for count in counts) for n in range(SECONDS)]
    return float(min(seconds) / statistics.median(seconds))


def publisher(conninfo: str, began: float, count: Any, stop: Any) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while not stop.is_set():
            connection.execute(PUBLISH)
            second = math.floor(time.time() - began)
            if 0 <= second < len(count):
                count[second] += BATCH


def dispatcher(conninfo: str, stop: Any) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while not stop.is_set():
            connection.execute("select pgmb.poll_for_events()")
            time.sleep(0.1)


def maintain(connection: psycopg.Connection) -> list[str]:
    """Do the steps of the maintenance, each in a transaction."""
    steps = ["pgmb.trim_published()", "pgmb.place_scheduled()::text"]
    for step in ("trim_partitions", "make_partitions", "drop_emptied"):
        steps += [f"pgmb.{step}('pgmb.{table}')" for table in ("dispatched", "events")]
    return [row[0] for step in steps for row in connection.execute(f"select {step}").fetchall()]


def mutations(connection: psycopg.Connection, report: Report) -> None:
    for name in ("unwatched", "watched"):
        connection.execute(f"create table {name} ({FLIGHT})")
    connection.execute("select pgmb.push_table_mutations('watched')")
    for rows, statements in STATEMENTS.items():
        with section(f"mutations as events / no trigger, {rows:,} rows a statement"):
            for op in ("insert", "update", "delete"):

                def write(table: str, op: str = op, rows: int = rows, statements: int = statements) -> float:
                    emptied = "pgmb.events, pgmb.published"
                    return written(connection, op, rows, statements, table, emptied=emptied).cpu

                plain, watched = side_by_side(5, partial(write, "unwatched"), partial(write, "watched"))
                report.say(op, ratio(watched, plain), "x")
                each = statistics.median(a - b for a, b in zip(watched, plain, strict=True))
                report.say(f"{op}, an event", each / rows / statements * 1e6, "us CPU")
