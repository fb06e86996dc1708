"""The relay: hears of the catalogue's changes and tells every client."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

import psycopg

from airflow_pgchange.errors import ClientRefused, HistoryTrimmed, PgChangeError, ServerUnavailable
from airflow_pgchange.topology import replies
from airflow_pgchange.topology.auth import Users
from airflow_pgchange.topology.catalogue import MOST_EVENTS, Catalogue, Lacking, Logged, Term
from airflow_pgchange.topology.connection import Connection, Limits
from airflow_pgchange.topology.encryption import Encryption
from airflow_pgchange.topology.listening import admit, close, listen
from airflow_pgchange.topology.protocol import Session
from airflow_pgchange.topology.raft import Raft

log = logging.getLogger(__name__)

PAUSE = 0.02
"""Seconds between two looks at the catalogue."""
RETRY = 0.25
"""Seconds until a catalogue that was lost is tried again."""
LOOK = 0.5
"""Seconds between two looks whether buckets have arrived that snapshots lacked."""
REFUSALS = 32
"""Sockets besides those of ``max_clients``, for telling others that there is no room once they have encrypted their
connection. Further connections are told so at once, and closed."""
PARTING = 2.0
"""Seconds that clients have to take what they were sent when the relay stops."""

NEW_TERM = "the catalogue was restarted, restored or failed over: a new snapshot has what is left"
TRIMMED = "events of the catalogue's log were trimmed before the relay had read them: a new snapshot has what they said"
ARRIVED = "ranges of buckets that were on their way have arrived: a new snapshot has them"
STOPPING = "the relay is stopping"
AGAIN = "connect again"


class Relay:
    """``users`` None trusts whoever connects; ``encryption`` None offers none."""

    def __init__(
        self,
        catalogue: Catalogue,
        users: Users | None,
        encryption: Encryption | None = None,
        limits: Limits = Limits(),  # noqa: B008
    ) -> None:
        self._catalogue = catalogue
        self._users = users
        self._encryption = encryption
        self._limits = limits
        self._numbers = itertools.count(1)
        self._open: set[Connection] = set()
        self._told: set[Connection] = set()
        self._waiting: set[Connection] = set()
        self._called = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._logged = ""
        self._term: Term | None = None
        self._at = Raft(0, 0)
        self._next_look = 0.0

    async def serve(self, host: str, port: int, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set. Raises OSError where nothing can listen there, SchemaMissing or PermissionDenied
        where the catalogue is none; one that cannot be reached is waited for."""
        sockets = await listen(host, port)
        log.info("listening on %s", ", ".join("{}:{}".format(*sock.getsockname()) for sock in sockets))
        admitting = [admit(sock, self._enter) for sock in sockets]
        working = {asyncio.create_task(task) for task in (self._follow(stop), stop.wait(), *admitting)}
        try:
            done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in working:
                task.cancel()
            await asyncio.wait(working)
            close(sockets)
            await self._part()
            await self._catalogue.close()
        log.info("stopped")

    def arrived(self, connection: Connection) -> None:
        self._waiting.add(connection)
        self._called.set()

    def gone(self, connection: Connection) -> None:
        for kept in (self._open, self._waiting, self._told):
            kept.discard(connection)
        if not self._open:
            self._empty.set()

    async def _enter(self, sock: socket.socket) -> None:
        """Serve whoever has connected. Raises OSError for a peer that has gone already."""
        if len(self._open) >= self._limits.max_clients + REFUSALS:
            await self._turn_away(sock)
            return
        connection = self._connection()
        self._open.add(connection)
        self._empty.clear()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except OSError:
            sock.close()
            self.gone(connection)
            raise

    async def _turn_away(self, sock: socket.socket) -> None:
        """Say that there is no room, and close the socket without reading from it, as PostgreSQL does where it cannot
        start another process."""
        # Others have their turn between two of many connections.
        await asyncio.sleep(0)
        with sock:
            sock.send(replies.error("53300", self._no_room, fatal=True))

    @property
    def _no_room(self) -> str:
        return f"there are {self._limits.max_clients} clients already"

    def _connection(self) -> Connection:
        number = next(self._numbers)
        full = len(self._open) >= self._limits.max_clients
        session = Session(
            number,
            self._users,
            encrypts=self._encryption is not None,
            demands=self._encryption is not None and self._encryption.required,
            binding=None if self._encryption is None else self._encryption.binding,
            refusal=ClientRefused("53300", self._no_room) if full else None,
        )
        return Connection(number, session, self, self._limits, self._encryption)

    async def _follow(self, stop: asyncio.Event) -> None:
        """Tell what happens, whichever server of the catalogue it happens on. To be cancelled is not enough to end it:
        before Python 3.12 that is lost where what is waited for comes at the same moment."""
        reached = False
        while not stop.is_set():
            try:
                await self._begin(await self._catalogue.connect())
                reached = True
                while not stop.is_set():
                    await self._round()
            except (PgChangeError, psycopg.Error) as error:
                # While a server is restored it may lack what it had and will have again.
                lost = isinstance(error, ServerUnavailable | psycopg.OperationalError)
                if not (lost or reached):
                    raise
                self._trouble(f"{type(error).__name__}: {str(error).strip()}")
            await asyncio.sleep(RETRY)

    def _trouble(self, text: str) -> None:
        """Log what is wrong with the catalogue once, however often it is tried."""
        if text != self._logged:
            log.warning("the catalogue is lost, and is looked for: %s", text)
        self._logged = text

    async def _begin(self, term: Term) -> None:
        self._logged = ""
        if self._users is not None:
            self._users.secret = await self._catalogue.salt_secret()
            for connection in list(self._open):
                connection.go_on()
        if term == self._term:
            log.info("the catalogue is back, in the same term %s", term.number)
            return
        self._term, self._at = term, await self._catalogue.now()
        log.info("the catalogue is in term %s", term.number)
        self._let_go(self._told, "57P01", NEW_TERM)

    async def _round(self) -> None:
        """One look: welcome who came, tell what happened, refresh whose picture lacks something."""
        self._called.clear()
        if self._waiting:
            await self._welcome()
        at = self._at
        more = await self._tell(at)
        # Who could not take some of it before is told from where it is: once a round, for all who are as far or further,
        # so that they delay the others by no more than that.
        behind = [connection.progress for connection in self._told if connection.takes]
        if behind and min(behind) < at:
            more = await self._tell(min(behind)) or more
        if asyncio.get_running_loop().time() >= self._next_look:
            await self._refresh()
            self._next_look = asyncio.get_running_loop().time() + LOOK
        if not more:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._called.wait(), PAUSE)

    async def _tell(self, after: Raft) -> bool:
        """Tell what happened behind ``after``, as much as is read at once, whoever has heard of all before it and takes
        more; whether there may be more."""
        try:
            events = await self._catalogue.events(after)
        except HistoryTrimmed:
            # Who is further behind takes nothing now: its turn comes.
            self._at = max(self._at, await self._catalogue.now())
            self._let_go([one for one in self._told if one.progress <= after], "57P01", TRIMMED)
            return True
        if events:
            self._publish(after, events)
            self._at = max(self._at, events[-1].raft)
        return len(events) == MOST_EVENTS

    async def _welcome(self) -> None:
        """One snapshot for all who came before it was asked for."""
        came = self._waiting.copy()
        snapshot = await self._catalogue.snapshot()
        pieces = replies.cut(replies.notice(event) for event in snapshot.events)
        # Without another await: no event can fall between a snapshot and what follows it.
        welcomed = self._waiting & came
        self._waiting -= welcomed
        self._told |= welcomed
        for connection in welcomed:
            connection.welcome(pieces, snapshot.raft, snapshot.lacking)

    async def _refresh(self) -> None:
        """Let go for whom buckets have arrived that it knows nothing of: at once where a new snapshot would be whole,
        else when its own is old enough. So one move that takes long does not keep the others from it, nor does each of
        many cost it a snapshot."""
        lacking: defaultdict[Lacking, list[Connection]] = defaultdict(list)
        for connection in self._told:
            if connection.lacking is not None:
                lacking[connection.lacking].append(connection)
        for lacked, connections in lacking.items():
            look = await self._catalogue.look(lacked)
            for connection in connections:
                connection.lacking = look.lacking
            if look.arrived:
                due = [connection for connection in connections if look.settled or connection.is_due]
                self._let_go(due, "57P01", ARRIVED)

    def _publish(self, after: Raft, events: Sequence[Logged]) -> None:
        rafts = [event.raft for event in events]
        notices = [replies.notice(event.event) for event in events]
        cuts: dict[int, list[bytes]] = {}
        for connection in self._told:
            if connection.progress < after or not connection.takes:
                continue
            first = bisect_right(rafts, connection.progress)
            if first not in cuts:
                cuts[first] = replies.cut(notices[first:])
            connection.offer(cuts[first])
            connection.progress = max(connection.progress, rafts[-1])

    def _let_go(self, connections: Iterable[Connection], sqlstate: str, reason: str) -> None:
        for connection in list(connections):
            connection.refuse(ClientRefused(sqlstate, reason, AGAIN), logging.INFO)

    async def _part(self) -> None:
        self._let_go(self._open, "57P01", STOPPING)
        with suppress(TimeoutError):
            async with asyncio.timeout(PARTING):
                await self._empty.wait()
