"""The relay's connection to the catalogue: its terms, its snapshot, what happens to it."""

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
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.topology.raft import Raft

PATIENCE = 10.0
"""Seconds that the catalogue may take for an answer before its server counts as lost."""
MOST_EVENTS = 5000
"""Events that are read at once."""

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
    """A term of the catalogue, and where its log is in it: a server that never got one may begin another of its number,
    as may a catalogue that was installed anew."""

    number: int
    system_identifier: int
    timeline: int
    started_at: datetime
    database: int
    log_file: int


class Logged(NamedTuple):
    """An event of the log, as its text."""

    raft: Raft
    event: str


@dataclass(frozen=True)
class Lacking:
    """Buckets, as the catalogue writes them, that a client knows nothing of: they were on their way when its snapshot was
    taken, and no event until ``told`` was about them."""

    buckets: str
    told: Raft


@dataclass(frozen=True)
class Look:
    """What is still lacking of what was; whether some of it has ``arrived``; whether everything is ``settled``, so that a
    new snapshot would lack nothing."""

    lacking: Lacking | None
    arrived: bool
    settled: bool


@dataclass(frozen=True)
class Snapshot:
    """The whole picture at one moment, but for what is ``lacking``."""

    raft: Raft
    lacking: Lacking | None
    events: Sequence[str]


class Catalogue:
    """One connection to the primary among the servers that ``conninfo`` names, for one user at a time."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._term: Term | None = None

    async def connect(self) -> Term:
        """Connect to whichever server takes writes now, and return its term.

        A term that is not the one before means that events may be lost which clients have heard of. Raises
        ServerUnavailable, SchemaMissing or PermissionDenied.
        """
        await self.close()
        with translated():
            self._connection = await connect_async(self._conninfo, primary=True)
        rows = await self._rows(TERM)
        self._term = Term(*rows[0])
        return self._term

    async def salt_secret(self) -> bytes:
        """What salts of unknown users are derived from: the same for all relays of this catalogue."""
        return bytes((await self._rows("select topology.salt_secret()"))[0][0])

    async def snapshot(self) -> Snapshot:
        """The picture now, all of one moment."""
        rows = await self._rows(SNAPSHOT)
        term, index, unsettled, _ = rows[0]
        at = Raft(term, index)
        lacking = None if unsettled is None else Lacking(unsettled, at)
        return Snapshot(at, lacking, [row[3] for row in rows if row[3] is not None])

    async def events(self, after: Raft) -> list[Logged]:
        """What happened behind ``after``, in order, at most ``MOST_EVENTS``. Raises HistoryTrimmed where some of it is
        gone, ServerUnavailable where the term is another than ``connect`` has found."""
        rows = await self._rows(EVENTS, [after.term, after.index, MOST_EVENTS])
        if Term(*rows[0][:-3]) != self._term:
            # A connection outlives a catalogue that is restored in its place, and one to a pooler the server behind it.
            raise ServerUnavailable(
                "another catalogue than before answers: wait until the relay knows its term"
            )
        return [Logged(Raft(term, index), event) for *_, term, index, event in rows if event is not None]

    async def now(self) -> Raft:
        """The last event that there is."""
        rows = await self._rows("select term, index from topology.now_at()")
        return Raft(*rows[0])

    async def look(self, lacking: Lacking) -> Look:
        """What has become of buckets that a client lacks."""
        rows = await self._rows(LACKING, [lacking.buckets, lacking.told.term, lacking.told.index])
        buckets, term, index, arrived, settled = rows[0]
        return Look(None if buckets is None else Lacking(buckets, Raft(term, index)), arrived, settled)

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
