"""The relay's connection to the catalogue: reads its term, snapshots and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import psycopg

from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.feeds.connections import connect_async
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.topology.raft import Raft

PATIENCE = 10.0
"""Timeout of a query of the catalogue in seconds; after it the server counts as lost."""
MOST_EVENTS = 5000
"""Maximum number of events in one query."""

SNAPSHOT = """
    select a.term, a.index, (select topology.unsettled()::text), s.event::text
    from topology.now_at() as a left join topology.snapshot() as s on true
"""
PLACE = "t.term, t.system_identifier, t.timeline, t.started_at, t.database, t.log_file"
TERM = f"select {PLACE} from topology.begin_term() as t"
LACKING = "select buckets::text, term, index, arrived, settled from topology.lacking(%s::jsonb, %s, %s)"
EVENTS = f"""
    select {PLACE}, e.term, e.index, e.event::text
    from topology.begin_term() as t left join topology.events(%s, %s, %s) as e on true
"""


class Term(NamedTuple):
    """A term of the catalogue, with the server and the log file that it was read from.

    The number alone does not identify a term. A server that never received the latest term, or a newly installed
    catalogue, can begin another term with the same number.
    """

    number: int
    system_identifier: int
    timeline: int
    started_at: datetime
    database: int
    log_file: int


class Logged(NamedTuple):
    """An event of the catalogue's log, as JSON text."""

    raft: Raft
    event: str


@dataclass(frozen=True)
class Lacking:
    """Buckets that are missing in a client's topology, as the catalogue's multirange text.

    They were moving when the client's snapshot was taken, and no event up to ``sent_up_to`` was about them.
    """

    buckets: str
    sent_up_to: Raft


@dataclass(frozen=True)
class LackingProgress:
    """The progress of the buckets that a client's topology is missing.

    ``lacking``: the buckets that are still missing, None if no bucket is. ``arrived``: whether some of them have settled,
    so that only a new snapshot has them. ``settled``: whether no bucket moves now, so that a new snapshot is complete.
    """

    lacking: Lacking | None
    arrived: bool
    settled: bool


@dataclass(frozen=True)
class Snapshot:
    """The topology at one moment, as events. ``lacking`` are the moving buckets that it does not contain."""

    raft: Raft
    lacking: Lacking | None
    events: Sequence[str]


class Catalogue:
    """One connection to the primary among the servers in ``conninfo``. Not for concurrent queries."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._term: Term | None = None

    async def connect(self) -> Term:
        """Connect to the current primary and return its term.

        If the term differs from the previous one, this catalogue may lack events that clients have already received.
        Raises ServerUnavailable, SchemaMissing or PermissionDenied.
        """
        await self.close()
        with translated():
            self._connection = await connect_async(self._conninfo, primary=True)
        rows = await self._rows(TERM)
        self._term = Term(*rows[0])
        return self._term

    async def salt_secret(self) -> bytes:
        """Return the secret for the salts of unknown users. It is the same for all relays of this catalogue."""
        return bytes((await self._rows("select topology.salt_secret()"))[0][0])

    async def snapshot(self) -> Snapshot:
        """Return the current topology, read in one statement so that it is consistent."""
        rows = await self._rows(SNAPSHOT)
        term, index, unsettled, _ = rows[0]
        at = Raft(term, index)
        lacking = None if unsettled is None else Lacking(unsettled, at)
        return Snapshot(at, lacking, [row[3] for row in rows if row[3] is not None])

    async def events(self, after: Raft) -> list[Logged]:
        """Return the events after the position ``after``, in order, at most ``MOST_EVENTS``.

        Raises HistoryTrimmed if some of them were deleted, and ServerUnavailable if the term has changed since
        ``connect``.
        """
        rows = await self._rows(EVENTS, [after.term, after.index, MOST_EVENTS])
        if Term(*rows[0][:-3]) != self._term:
            # The connection can survive the change: the database was restored in place, or a pooler switched servers.
            raise ServerUnavailable(
                "another catalogue than before answers: wait until the relay knows its term"
            )
        return [Logged(Raft(term, index), event) for *_, term, index, event in rows if event is not None]

    async def now(self) -> Raft:
        """Return the position of the last event."""
        rows = await self._rows("select term, index from topology.now_at()")
        return Raft(*rows[0])

    async def progress_of(self, lacking: Lacking) -> LackingProgress:
        """Return the progress of the buckets that a client's topology is missing."""
        rows = await self._rows(LACKING, [lacking.buckets, lacking.sent_up_to.term, lacking.sent_up_to.index])
        buckets, term, index, arrived, settled = rows[0]
        return LackingProgress(
            None if buckets is None else Lacking(buckets, Raft(term, index)), arrived, settled
        )

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
    """Close the connection and raise ServerUnavailable if the server does not answer within ``PATIENCE`` seconds."""
    try:
        with translated():
            async with asyncio.timeout(PATIENCE):
                yield
    except TimeoutError as error:
        await connection.close()
        raise ServerUnavailable(
            f"the catalogue's server did not answer within {PATIENCE:g} s: check it; another is tried"
        ) from error
