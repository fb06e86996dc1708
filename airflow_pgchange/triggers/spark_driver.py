"""The trigger that waits for the driver of a detached batch in a standalone Spark cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psycopg
from airflow.triggers.base import BaseTrigger, TriggerEvent
from psycopg import sql

from airflow_pgchange.detached import RENEWALS, Handle
from airflow_pgchange.errors import PgChangeError, StaleClaim
from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.feeds.queries import ask_all
from airflow_pgchange.triggers import spark_standalone
from airflow_pgchange.triggers.poller import switchboard
from airflow_pgchange.triggers.spark_standalone import ENDED, Driver


class DriverTrigger(BaseTrigger):
    """Fires once: when a driver has ended, with its state, or when another attempt on the driver's batch has begun.

    In the second case it kills the driver first, and the event has the reason as ``stale``. Until then it renews the
    lease of the batch. Each renewal opens a connection and closes it at once. The wait continues while the masters or the
    database cannot be reached.
    """

    def __init__(
        self,
        handle: str,
        postgres_conn_id: str,
        driver: str,
        masters: Sequence[str],
        *,
        poll_interval: Seconds = 1.0,
    ) -> None:
        """``postgres_conn_id``: the database of the changes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle = handle
        self.postgres_conn_id = postgres_conn_id
        self.driver = Driver(driver, tuple(masters))
        self.poll_interval = seconds("poll_interval", poll_interval)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.DriverTrigger", {
            "handle": self.handle,
            "postgres_conn_id": self.postgres_conn_id,
            "driver": self.driver.id,
            "masters": list(self.driver.masters),
            "poll_interval": self.poll_interval,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        handle, loop = Handle.from_text(self.handle), asyncio.get_running_loop()
        renew_interval, renew_at = seconds("lease", handle.lease) / RENEWALS, loop.time()
        while True:
            if loop.time() >= renew_at:
                renew_at = loop.time() + renew_interval
                try:
                    await self._ask(handle.feed.renew(handle.token, handle.lease))
                except StaleClaim as error:
                    await asyncio.to_thread(spark_standalone.kill, self.driver)
                    yield self._fired(stale=str(error))
                    return
                except (PgChangeError, psycopg.Error) as error:
                    self.log.warning("%s: could not renew the lease, will retry: %s", handle.feed.name, error)
            state = await asyncio.to_thread(spark_standalone.state_of, self.driver)
            if state in ENDED:
                yield self._fired(state=state)
                return
            await asyncio.sleep(self.poll_interval)

    async def on_kill(self) -> None:
        """Kill the driver and end the lease, because a user has cleared or marked the task. Airflow calls this from
        version 3.3 on."""
        await asyncio.to_thread(spark_standalone.kill, self.driver)
        handle = Handle.from_text(self.handle)
        await self._ask(handle.feed.end_lease(handle.token))

    async def _ask(self, query: sql.Composed) -> None:
        connection = await switchboard().connect(self.postgres_conn_id)
        async with connection:
            await ask_all(connection, [query])

    def _fired(self, **outcome: str | None) -> TriggerEvent:
        # The event has everything that the task needs, because dag.test() keeps nothing else of a deferred task.
        return TriggerEvent({"handle": self.handle, "driver": self.driver.id, **outcome})  # type: ignore[no-untyped-call]
