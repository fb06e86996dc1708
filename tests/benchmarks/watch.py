"""What watching costs by the number of feeds that one triggerer watches."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import psycopg

from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.feeds.connect import connect_async
from airflow_pgchange.triggers.poller import Clock, Link, Poller, Subscription
from airflow_pgchange.triggers.watches import BacklogWatch
from tests.benchmarks.measure import Report, backend_cpu, section

ROUNDS = 100


async def milliseconds_a_feed(conninfo: str, feeds: int) -> float:
    """CPU of the one backend that answers, for one look at each feed."""

    async def opener(conn_id: str, primary: bool) -> psycopg.AsyncConnection[Any]:
        return await connect_async(conninfo, primary=primary)

    link = Link("airline", True, opener)
    poller = Poller(link, link, Clock())
    poller.subscriptions = [
        Subscription(BacklogWatch(CommitFeed(f"watched {n}", 0)), interval=0.1) for n in range(feeds)
    ]

    async def look() -> None:
        for subscription in poller.subscriptions:
            subscription.due_at = float("-inf")
        await poller.look()

    try:
        await look()
        connection = await link.connection()
        before = backend_cpu(connection)
        for _ in range(ROUNDS):
            await look()
        return (backend_cpu(connection) - before) / ROUNDS / feeds * 1000
    finally:
        await link.close()


def run(conninfo: str, report: Report) -> None:
    with section("watching 1, 10 and 100 feeds over one connection, ms of CPU a feed and look"):
        costs = {}
        for feeds in (1, 10, 100):
            costs[feeds] = statistics.median(
                asyncio.run(milliseconds_a_feed(conninfo, feeds)) for _ in range(3)
            )
            report.say(f"{feeds} feeds", costs[feeds], "ms")
        report.say("100 feeds / 10 feeds", costs[100] / costs[10], "x", most=1.2)
