"""The seconds from a commit to the trigger's event, compared with the time that NOTIFY takes to reach a listener."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time

import psycopg

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from tests import airflow_home
from tests.benchmarks.measure import Report, section
from tests.watching import first

ROUNDS = 60
FEED = CommitFeed("woken", 0)


def run(conninfo: str, report: Report) -> None:
    airflow_home.prepare()
    os.environ["AIRFLOW_CONN_HERE"] = airflow_home.uri(conninfo)
    with section("from a commit to the trigger's event"):
        woken = sorted(asyncio.run(wake_ups(conninfo)))
        told = sorted(asyncio.run(notifications(conninfo)))
        report.say("median", statistics.median(woken) * 1000, "ms")
        report.say("95 of 100 within", woken[round(0.95 * len(woken))] * 1000, "ms")
        report.say("NOTIFY to a listener, median", statistics.median(told) * 1000, "ms")


async def wake_ups(conninfo: str) -> list[float]:
    from airflow_pgchange.triggers.feed import FeedTrigger

    seconds = []
    async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as writer:
        for n in range(ROUNDS):
            waiting = asyncio.ensure_future(first(FeedTrigger(FEED, "here")))
            await asyncio.sleep(0.3 + n % 10 / 97)
            await writer.execute("insert into revision.commit default values")
            committed = time.monotonic()
            await waiting
            seconds.append(time.monotonic() - committed)
            await asyncio.to_thread(consume, conninfo)
    return seconds


def consume(conninfo: str) -> None:
    with ConsumerTransaction(FEED, conninfo) as consumer:
        consumer.claim(10)
        consumer.ack()


async def notifications(conninfo: str) -> list[float]:
    seconds: list[float] = []
    heard = asyncio.Event()
    async with (
        await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as writer,
        await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as listener,
    ):
        await listener.execute("listen woken")

        async def listen() -> None:
            async for _ in listener.notifies():
                heard.set()

        listening = asyncio.create_task(listen())
        for _ in range(ROUNDS):
            await asyncio.sleep(0.02)
            heard.clear()
            await writer.execute("notify woken")
            committed = time.monotonic()
            await heard.wait()
            seconds.append(time.monotonic() - committed)
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
    return seconds
