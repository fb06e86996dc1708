"""Looking up Airflow's connections from the event loop, while Airflow may be slow.

The triggerer asks its supervisor for a connection, in up to four messages. The supervisor answers a message between two
rounds of work on the metadata database. If that is SQLite under load, a lookup can take minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context

from airflow.providers.common.compat.sdk import AirflowException, AirflowNotFoundException

from airflow_pgchange.errors import AirflowUnavailable, InvalidArgument, ServerUnavailable
from airflow_pgchange.feeds.connections import connect_async
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.triggers.loop_time import within
from airflow_pgchange.triggers.shared_connection import Connection

LOOKED_UP_WITHIN = 30.0
"""Seconds that a caller waits for a lookup. The lookup itself continues."""
CONNECTED_WITHIN = 30.0
"""Seconds for PostgreSQL to accept a connection, on any of the connection's hosts."""
ASK_AGAIN_AFTER = (1.0, 2.0)
"""Pauses in seconds before a connection that Airflow reports as undefined is looked up again. Airflow's SDK also reports
this if the lookup failed because the metadata database was locked."""

Ask = Callable[[str], Awaitable[str]]


async def ask_airflow(conn_id: str) -> str:
    """Return an Airflow connection as a libpq string."""
    return await PgChangeHook(conn_id).aconninfo()


class Lookups:
    """The lookups of one event loop. All callers that wait for the same connection share one lookup.

    A lookup outlives the callers that give up waiting, and the next caller gets its result. If each caller began a new
    lookup, a slow supervisor would get more and more messages, and would answer none of them in time.
    """

    def __init__(self, ask: Ask = ask_airflow) -> None:
        self._ask = ask
        self._lookups: dict[str, asyncio.Task[str]] = {}

    async def open(self, conn_id: str, primary: bool) -> Connection:
        """Open an Airflow connection. It is looked up each time, so that a changed password takes effect.

        Raises AirflowUnavailable, InvalidArgument, and ServerUnavailable.
        """
        conninfo = await self.conninfo(conn_id)
        try:
            async with within(CONNECTED_WITHIN):
                return await connect_async(conninfo, primary=primary)
        except TimeoutError as error:
            raise ServerUnavailable(
                f"{conn_id}: PostgreSQL accepted no connection within {CONNECTED_WITHIN:g} s"
            ) from error

    async def conninfo(self, conn_id: str) -> str:
        """Return the connection as a libpq string.

        Raises AirflowUnavailable if Airflow has not answered yet, InvalidArgument if it has no such connection.
        """
        lookup = self._lookups.get(conn_id)
        if lookup is None:
            # The context is empty so that the lookup's log lines are attributed to no trigger.
            lookup = self._lookups[conn_id] = asyncio.create_task(
                self._look_up(conn_id), name="pgchange-lookup", context=Context()
            )
        try:
            async with within(LOOKED_UP_WITHIN):
                return await asyncio.shield(lookup)
        except TimeoutError as error:
            raise AirflowUnavailable(
                f"{conn_id}: Airflow did not return this connection within {LOOKED_UP_WITHIN:g} s. PostgreSQL was not "
                "asked. The triggerer's supervisor waits for the metadata database, or a secrets backend is slow"
            ) from error
        finally:
            # Remove only our own lookup: another caller may have removed it and begun a new lookup meanwhile.
            if lookup.done() and self._lookups.get(conn_id) is lookup:
                del self._lookups[conn_id]

    def forget(self, conn_id: str) -> None:
        """Cancel the lookup of a connection, and drop its result."""
        lookup = self._lookups.pop(conn_id, None)
        if lookup is not None and not lookup.cancel():
            # asyncio logs the exception of a task if no caller has retrieved it.
            with suppress(asyncio.CancelledError):
                lookup.exception()

    async def _look_up(self, conn_id: str) -> str:
        for pause in ASK_AGAIN_AFTER:
            with suppress(AirflowNotFoundException):
                return await self._ask_once(conn_id)
            await asyncio.sleep(pause)
        try:
            return await self._ask_once(conn_id)
        except AirflowNotFoundException as error:
            raise InvalidArgument(f"connection {conn_id}: {error}") from error

    async def _ask_once(self, conn_id: str) -> str:
        try:
            return await self._ask(conn_id)
        except AirflowNotFoundException:
            raise
        except TimeoutError as error:
            raise AirflowUnavailable(f"{conn_id}: Airflow's lookup of this connection timed out") from error
        except AirflowException as error:
            raise InvalidArgument(f"connection {conn_id}: {error}") from error
