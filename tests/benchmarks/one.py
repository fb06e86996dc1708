"""Batches of one change: in one drain, which keeps its sessions, beside a drain for each batch, which opens them anew."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, EventFeed, QueueFeed, TubeFeed
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.feeds.feed import Feed
from tests.benchmarks.measure import Cost, Report, ratio, section, side_by_side, wall

BATCHES = 40
ROUNDS = 5
TICKS = os.sysconf("SC_CLK_TCK")
MADE = """
select revision.track('item'), tube.tube_ensure_exists('t'), mbus.create_queue('q', 4);
select tube.tube_table_ensure_attached('t', 'item', 0);
insert into pgmb.subscriptions (group_id) values ('g')
"""
FEEDS: dict[str, tuple[Feed, str, float | None]] = {
    "commit": (CommitFeed("one", 0), "insert into revision.commit default values", 8.0),
    "event": (
        EventFeed("g"),
        "insert into pgmb.events (topic, payload) values ('t', '{}')",
        10.0,
    ),
    "queue": (QueueFeed("q"), "select mbus.post_q('a=>1')", None),
    "tube": (TubeFeed("t", 0), "insert into item select coalesce(max(id), 0) + 1 from item", None),
}
"""By kind: a feed, a statement that writes a change, and the goal for a batch in milliseconds of the server's CPU."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("create table item (id bigint primary key)")
        connection.execute(MADE)
        for name, (feed, write, most) in FEEDS.items():
            cost = partial(costs, connection, conninfo, feed, write)
            with section(f"a batch of one {name}, in a drain of {BATCHES} / in a drain for each"):
                kept, anew = side_by_side(ROUNDS, partial(cost, 1), partial(cost, BATCHES))
                report.say(
                    "CPU of the server", 1000 * sorted(c.cpu for c in kept)[ROUNDS // 2], "ms", most=most
                )
                report.say(
                    "CPU of the server, sessions anew", 1000 * sorted(c.cpu for c in anew)[ROUNDS // 2], "ms"
                )
                report.say("ratio", ratio([c.cpu for c in kept], [c.cpu for c in anew]), "x")
                report.say("time", 1000 * sorted(c.waited for c in kept)[ROUNDS // 2], "ms")
                report.say("time, sessions anew", 1000 * sorted(c.waited for c in anew)[ROUNDS // 2], "ms")


def costs(connection: psycopg.Connection[Any], conninfo: str, feed: Feed, write: str, drains: int) -> Cost:
    """Return the cost of a batch of one change, if ``BATCHES`` such batches are processed in this number of drains."""
    connection.execute("truncate item")
    drain(Plan(feed, conninfo, max_batches=None), acked)
    for _ in range(BATCHES):
        connection.execute(write)
    plan = Plan(feed, conninfo, limit=1, max_batches=BATCHES // drains)
    before = server_cpu(connection)
    waited = wall(lambda: [drain(plan, acked) for _ in range(drains)])
    return Cost((server_cpu(connection) - before) / BATCHES, waited / BATCHES)


def acked(transaction: ConsumerTransaction, batch: Batch) -> None:
    assert len([*transaction.changes()]) == batch.count
    transaction.ack()


def server_cpu(connection: psycopg.Connection[Any]) -> float:
    """Return the CPU seconds of the whole server: of the postmaster, of its processes, and of processes that have
    ended."""
    postmaster = int(
        Path(f"/proc/{connection.info.backend_pid}/stat").read_text().rpartition(") ")[2].split()[1]
    )
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    live = sum(sum(_ticks(int(pid))[:2]) for pid in children)
    return (live + sum(_ticks(postmaster))) / TICKS


def _ticks(pid: int) -> list[int]:
    """Return the CPU times of a process: user and system, and the same of its children that have ended."""
    return [int(n) for n in Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:15]]
