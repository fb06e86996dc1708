"""A feed that triggers watch, and what they come to, for the tests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from airflow.triggers.base import BaseTrigger

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from tests.airflow_home import uri

FEED = CommitFeed("delays", 0)
NAME = "pgchange-watching"


def uri_by_name(db: str) -> str:
    """Of an Airflow connection that the server can tell from all others."""
    return f"{uri(db)}?application_name={NAME}"


def process(db: str, limit: int = 1000) -> int:
    """Process a batch; how many changes it has."""
    with ConsumerTransaction(FEED, db) as transaction:
        batch = transaction.claim(limit)
        if batch is None:
            return 0
        transaction.ack()
        return batch.count


async def first(trigger: BaseTrigger) -> Any:
    """The payload of the first event."""
    async with asyncio.timeout(20), contextlib.aclosing(trigger.run()) as events:  # type: ignore[type-var]
        event = await anext(events)
        return event.payload
