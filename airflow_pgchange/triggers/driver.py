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
from airflow_pgchange.feeds.checks import Seconds, seconds
from airflow_pgchange.feeds.queries import ask_all
from airflow_pgchange.triggers import standalone
from airflow_pgchange.triggers.poller import switchboard
from airflow_pgchange.triggers.standalone import ENDED, Driver


class DriverTrigger(BaseTrigger):
    """Fires when a driver has ended, with its state, or when another attempt on its batch has begun; then it kills the
    driver.

    Meanwhile it renews the lease of the batch, each time by a connection of its own that it closes at once. Neither a
    master nor a database that cannot be reached ends the wait.
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
        every, renew_at = seconds("lease", handle.lease) / RENEWALS, loop.time()
        while True:
            if loop.time() >= renew_at:
                renew_at = loop.time() + every
                try:
                    await self._ask(handle.feed.renew(handle.token, handle.lease))
                except StaleClaim as error:
                    await asyncio.to_thread(standalone.kill, self.driver)
                    yield self._fired(stale=str(error))
                    return
                except (PgChangeError, psycopg.Error) as error:
                    self.log.warning("%s: the lease was not renewed now: %s", handle.feed.name, error)
            state = await asyncio.to_thread(standalone.state_of, self.driver)
            if state in ENDED:
                yield self._fired(state=state)
                return
            await asyncio.sleep(self.poll_interval)

    async def on_kill(self) -> None:
        """End the driver and the lease, as a person has cleared or marked the task. Airflow calls it from 3.3 on."""
        await asyncio.to_thread(standalone.kill, self.driver)
        handle = Handle.from_text(self.handle)
        await self._ask(handle.feed.end_lease(handle.token))

    async def _ask(self, query: sql.Composed) -> None:
        connection = await switchboard().connect(self.postgres_conn_id)
        async with connection:
            await ask_all(connection, [query])

    def _fired(self, **told: str | None) -> TriggerEvent:
        # All that the task needs, because dag.test() keeps nothing else of a deferred task.
        return TriggerEvent({"handle": self.handle, "driver": self.driver.id, **told})  # type: ignore[no-untyped-call]
