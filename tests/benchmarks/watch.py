"""The cost of watching, for different numbers of feeds in a triggerer."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_pgchange.feeds import CommitFeed, TubeFeed
from airflow_pgchange.feeds.connections import connect_async
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.triggers.poller import Clock, Poller
from airflow_pgchange.triggers.shared_connection import Link
from airflow_pgchange.triggers.subscription import Subscription
from airflow_pgchange.triggers.watch_queries import BacklogWatch
from tests.benchmarks.measure import Report, backend_cpu, section

ROUNDS = 100
SECONDS = 10.0


@contextlib.asynccontextmanager
async def watching(conninfo: str, feeds: Sequence[Watched]) -> AsyncIterator[Poller]:
    async def opener(conn_id: str, primary: bool) -> psycopg.AsyncConnection[Any]:
        return await connect_async(conninfo, primary=primary)

    link = Link("airline", True, opener)
    poller = Poller(link, link, Clock())
    poller.subscriptions = [Subscription(BacklogWatch(feed), interval=0.1) for feed in feeds]
    try:
        yield poller
    finally:
        await link.close()


def consumers(count: int) -> list[Watched]:
    return [CommitFeed(f"watched {number}", 0) for number in range(count)]


def workers(conninfo: str, count: int) -> list[Watched]:
    """Return this number of feeds, each of another tube."""
    names = [f"watched_{number}" for number in range(count)]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for name in names:
            connection.execute("select tube.tube_ensure_exists(%s)", [name])
    return [TubeFeed(name) for name in names]


async def milliseconds_a_feed(conninfo: str, feeds: Sequence[Watched]) -> float:
    """Return the CPU time of the backend for one query of each feed."""

    async with watching(conninfo, feeds) as poller:

        async def look() -> None:
            for subscription in poller.subscriptions:
                subscription.due_at = float("-inf")
            await poller.poll()

        await look()
        connection = await poller.links[1].connection()
        before = backend_cpu(connection)
        for _ in range(ROUNDS):
            await look()
        return (backend_cpu(connection) - before) / ROUNDS / len(feeds) * 1000


@dataclass(frozen=True)
class Pace:
    """The number of queries of each feed in a second, and the share of a core that their backend uses. The number is
    lower on a busy machine."""

    looks: float
    share: float

    @property
    def share_of_two(self) -> float:
        """Return the share of a core for two queries of each feed a second, no matter how busy the machine is."""
        return 2 * self.share / self.looks


async def pace(conninfo: str, feeds: Sequence[Watched]) -> Pace:
    """Return the number of queries and the share of a core of a running poller."""
    async with watching(conninfo, feeds) as poller:
        await poller.poll()
        connection = await poller.links[1].connection()
        looks, before, began = 0, backend_cpu(connection), time.monotonic()
        while time.monotonic() < began + SECONDS:
            next_due = min(s.due_at for s in poller.subscriptions)
            await asyncio.sleep(max(0.0, next_due - time.monotonic()))
            await poller.poll()
            looks += 1
        seconds = time.monotonic() - began
        return Pace(looks / seconds, (backend_cpu(connection) - before) / seconds)


def run(conninfo: str, report: Report) -> None:
    kinds = {"consumers of commits": consumers(300), "workers of tubes": workers(conninfo, 300)}
    for kind, feeds in kinds.items():
        with section(f"watching 300 {kind} over one connection"):
            paces = [asyncio.run(pace(conninfo, feeds)) for _ in range(3)]
            report.say("looks a second", statistics.median(p.looks for p in paces), "", least=2.0)
            report.say("share of a core", statistics.median(p.share for p in paces), "", most=0.5)
            shares = [p.share_of_two for p in paces]
            report.say("share of a core at two looks a second", statistics.median(shares), "", most=0.5)
    with section("watching 1, 10 and 100 feeds over one connection, ms of CPU a feed and look"):
        costs = {}
        for number in (1, 10, 100):
            costs[number] = statistics.median(
                asyncio.run(milliseconds_a_feed(conninfo, consumers(number))) for _ in range(3)
            )
            report.say(f"{number} feeds", costs[number], "ms")
        report.say("100 feeds / 10 feeds", costs[100] / costs[10], "x", most=1.2)
