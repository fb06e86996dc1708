"""What watching costs by the number of feeds that one triggerer watches."""

from __future__ import annotations

import asyncio
import statistics

import psycopg

from airflow_pgchange.feeds import CommitFeed, watching
from airflow_pgchange.feeds.connect import connect_async
from tests.benchmarks.measure import Report, backend_cpu, section

ROUNDS = 100


async def milliseconds_a_feed(conninfo: str, feeds: int) -> float:
    """CPU of the one backend that answers, for one look at each feed."""
    wanted = [(CommitFeed(f"watched {n}"), 1) for n in range(feeds)]
    async with await connect_async(conninfo) as connection:
        await watching.lags(connection, connection, wanted)
        with psycopg.connect(conninfo):
            before = backend_cpu(connection)
            for _ in range(ROUNDS):
                await watching.lags(connection, connection, wanted)
            return (backend_cpu(connection) - before) / ROUNDS / feeds * 1000


def run(conninfo: str, report: Report) -> None:
    with section("watching 1, 10 and 100 feeds over one connection, ms of CPU a feed and look"):
        costs = {}
        for feeds in (1, 10, 100):
            costs[feeds] = statistics.median(
                asyncio.run(milliseconds_a_feed(conninfo, feeds)) for _ in range(3)
            )
            report.say(f"{feeds} feeds", costs[feeds], "ms")
        report.say("100 feeds / 10 feeds", costs[100] / costs[10], "x", most=1.2)
