"""A second connection to a server. It knows whether the server is there, and whether it still works on a statement."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import psycopg

LOCK_TIMEOUT = "set lock_timeout = '1s'"
"""A wait for a lock on a system catalogue must not count as silence."""
SESSION = """
    pg_catalog.pg_backend_pid(), extract(epoch from pg_catalog.pg_postmaster_start_time())::float8,
    pg_catalog.host(pg_catalog.inet_server_addr()), pg_catalog.inet_server_port()
"""
"""The process id of a session, and the start time and address of its server. The time is a number, because psycopg cannot
read times in every date style."""
STATE = """
    select a.state, extract(epoch from clock_timestamp() - a.state_change)::float8
    from pg_catalog.pg_stat_get_activity(%s) as a
"""
AT_REST = ("idle", "idle in transaction", "idle in transaction (aborted)")
SLICES = 10
"""The number of slices of the wait. If this process is stopped meanwhile, that uses up one slice, and not the whole
wait."""


Server = tuple[float, str | None, int | None]


class ProbeResult(Enum):
    """The result of a check by a probe."""

    SILENCE = auto()
    """Nothing came from the server."""
    AT_REST = auto()
    """The session has finished its statement, never got it, or has ended."""
    AT_WORK = auto()
    """The session works on its statement, or the server has answered without telling the state."""


class LivenessProbe:
    """A second connection to the server at ``address``, a connection string.

    Any answer, even a refusal, proves that the server is there. Behind a pooler a query may wait until a session is free,
    so there the answer to the login is the proof.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._probing = asyncio.Lock()
        self._silences = 0
        self._greeted = False
        self._login_at = 0.0

    async def probe(
        self, pid: int | None, server: Server | None, *, opened_at: float, within: float, settled: float
    ) -> ProbeResult:
        """Check session ``pid`` of ``server``; None: check only whether the server answers. A session counts as at rest
        after it was so for ``settled`` seconds."""
        silences = self._silences
        async with self._probing:
            if self._silences > silences:
                return ProbeResult.SILENCE
            if self._connection is None and time.monotonic() < self._login_at:
                return ProbeResult.AT_WORK
            # If each check needs a login, do not log in at every check: servers log logins, and poolers limit them.
            self._login_at = time.monotonic() + within / 2
            self._greeted = False
            state = asyncio.create_task(self._state(pid, server, opened_at, settled))
            for _ in range(SLICES):
                done, _ = await asyncio.wait({state}, timeout=within / SLICES)
                if done:
                    break
            else:
                state.cancel()
                await asyncio.wait({state}, timeout=within / SLICES)
                await self.close()
                if self._greeted:
                    return ProbeResult.AT_WORK
                self._silences += 1
                return ProbeResult.SILENCE
            try:
                return state.result()
            except (psycopg.Error, OSError):
                await self.close()
                return ProbeResult.AT_WORK

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()

    async def _state(
        self, pid: int | None, server: Server | None, opened_at: float, settled: float
    ) -> ProbeResult:
        if self._connection is None or self._connection.closed:
            self._connection = await psycopg.AsyncConnection.connect(
                self._address,
                autocommit=True,
                prepare_threshold=None,
                cursor_factory=psycopg.AsyncClientCursor,
            )
            self._greeted = True
            if pid is not None:
                await self._connection.execute(LOCK_TIMEOUT)
        if pid is None or server is None:
            await self.close()
            return ProbeResult.AT_WORK
        cursor = await self._connection.execute(f"select {SESSION}")
        ours, *there = await cursor.fetchone() or (None,)
        if ours == self._connection.info.backend_pid and there[1:] == [*server[1:]] and there[0] > opened_at:
            # The server was restarted, which has ended its sessions.
            return ProbeResult.AT_REST
        if ours != self._connection.info.backend_pid or there != [*server]:
            # This is a pooler, which assigns shared sessions, or a load balancer, which chose another server.
            await self.close()
            return ProbeResult.AT_WORK
        cursor = await self._connection.execute(STATE, [pid])
        row = await cursor.fetchone()
        if row is None or (row[0] in AT_REST and row[1] >= settled):
            return ProbeResult.AT_REST
        return ProbeResult.AT_WORK
