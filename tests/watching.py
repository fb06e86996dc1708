"""A feed that triggers watch, and functions to process it and to await a trigger's event, for the tests."""

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
    """Return an Airflow connection with an application name by which tests find its sessions on the server."""
    return f"{uri(db)}?application_name={NAME}"


def process(db: str, limit: int = 1000) -> int:
    """Process a batch, and return the number of its changes."""
    with ConsumerTransaction(FEED, db) as transaction:
        batch = transaction.claim(limit)
        if batch is None:
            return 0
        transaction.ack()
        return batch.count


async def first(trigger: BaseTrigger) -> Any:
    """Return the payload of the trigger's first event."""
    async with asyncio.timeout(20), contextlib.aclosing(trigger.run()) as events:  # type: ignore[type-var]
        event = await anext(events)
        return event.payload
