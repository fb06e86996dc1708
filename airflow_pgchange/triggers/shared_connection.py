"""The connection to a database that all triggers for its feeds share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import psycopg

Connection = psycopg.AsyncConnection[Any]
Opener = Callable[[str, bool], Awaitable[Connection]]


class Link:
    """The shared connection to one database. It is opened at the first use, and opened again after it was lost."""

    def __init__(self, conn_id: str, primary: bool, opener: Opener) -> None:
        self.conn_id = conn_id
        self._primary = primary
        self._opener = opener
        self._opening = asyncio.Lock()
        self._connection: Connection | None = None

    async def connection(self) -> Connection:
        async with self._opening:
            if (connection := self.opened) is None:
                connection = self._connection = await self._opener(self.conn_id, self._primary)
            return connection

    @property
    def opened(self) -> Connection | None:
        """The connection, if it is open."""
        return None if self._connection is None or self._connection.closed else self._connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()
