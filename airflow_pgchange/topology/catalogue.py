"""The relay's connection to the catalogue: its terms, its snapshot, what happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg

from airflow_pgchange.feeds.connect import connect_async
from airflow_pgchange.feeds.errors import ServerUnavailable, translated
from airflow_pgchange.topology.raft import Raft

PATIENCE = 10.0
"""Seconds that the catalogue may take for an answer before its server counts as lost."""
MOST_EVENTS = 5000
"""Events that are read at once."""

SNAPSHOT = """
    select a.term, a.index, (select topology.unsettled()), s.event::text
    from topology.now_at() as a left join topology.snapshot() as s on true
"""
EVENTS = "select e.term, e.index, e.event::text from topology.events(%s, %s, %s) as e"


class Logged(NamedTuple):
    """An event of the log, as its text."""

    raft: Raft
    event: str


@dataclass(frozen=True)
class Snapshot:
    """The whole picture at one moment; of an ``unsettled`` one ranges are missing that were on their way."""

    raft: Raft
    unsettled: bool
    events: Sequence[str]


class Catalogue:
    """One connection to the primary among the servers that ``conninfo`` names, for one user at a time."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def connect(self) -> int:
        """Connect to whichever server takes writes now, and return its term.

        A term that is not the one before means that events may be lost which clients have heard of. Raises
        ServerUnavailable, SchemaMissing or PermissionDenied.
        """
        await self.close()
        with translated():
            self._connection = await connect_async(self._conninfo, primary=True)
        rows = await self._rows("select topology.begin_term()")
        return int(rows[0][0])

    async def snapshot(self) -> Snapshot:
        """The picture now, all of one moment."""
        rows = await self._rows(SNAPSHOT)
        term, index, unsettled, _ = rows[0]
        return Snapshot(Raft(term, index), unsettled, [row[3] for row in rows if row[3] is not None])

    async def events(self, after: Raft) -> list[Logged]:
        """What happened behind ``after``, in order, at most ``MOST_EVENTS``."""
        rows = await self._rows(EVENTS, [after.term, after.index, MOST_EVENTS])
        return [Logged(Raft(term, index), event) for term, index, event in rows]

    async def now(self) -> Raft:
        """The last event that there is."""
        rows = await self._rows("select term, index from topology.now_at()")
        return Raft(*rows[0])

    async def unsettled(self) -> bool:
        """Whether ranges are on their way now."""
        rows = await self._rows("select topology.unsettled()")
        return bool(rows[0][0])

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _rows(self, query: str, arguments: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise ServerUnavailable(
                "the catalogue is not connected: wait until the relay has reached it again"
            )
        async with _patience(self._connection):
            cursor = await self._connection.execute(query, arguments)
            return await cursor.fetchall()


@asynccontextmanager
async def _patience(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[None]:
    """A server that neither answers nor ends the connection counts as lost, too."""
    try:
        with translated():
            async with asyncio.timeout(PATIENCE):
                yield
    except TimeoutError as error:
        await connection.close()
        raise ServerUnavailable(
            f"the catalogue's server did not answer within {PATIENCE:g} s: check it; another is tried"
        ) from error
