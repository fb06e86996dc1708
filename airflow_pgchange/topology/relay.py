"""The relay: reads events from the catalogue and sends them to every client."""

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
"""Poll interval of the catalogue's log in seconds."""
RETRY = 0.25
"""Seconds before the relay reconnects to a lost catalogue."""
LOOK = 0.5
"""Seconds between two checks of the buckets that snapshots were missing."""
REFUSALS = 32
"""Connections above ``max_clients`` that may still encrypt and send their startup packet, so that they receive the error
over TLS. Further connections get the error at once and are closed."""
PARTING = 2.0
"""Seconds that clients have to read their last messages when the relay stops."""

NEW_TERM = "the catalogue was restarted, restored or failed over: a new snapshot has its current state"
TRIMMED = "events of the catalogue's log were trimmed before the relay had read them: a new snapshot has what they said"
ARRIVED = "ranges of buckets that were on their way have arrived: a new snapshot has them"
STOPPING = "the relay is stopping"
AGAIN = "connect again"


class Relay:
    """Serves the clients of one catalogue.

    ``users``: None accepts every client without a password. ``encryption``: None offers no TLS.
    """

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
        self._subscribed: set[Connection] = set()
        self._waiting: set[Connection] = set()
        self._called = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._logged = ""
        self._term: Term | None = None
        self._at = Raft(0, 0)
        self._next_look = 0.0

    async def serve(self, host: str, port: int, stop: asyncio.Event) -> None:
        """Serve clients until ``stop`` is set. If the catalogue cannot be reached, retry until it can.

        Raises OSError if the relay cannot listen on the address. Raises SchemaMissing if the database has no catalogue,
        and PermissionDenied if the role may not read it.
        """
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
        for connections in (self._open, self._waiting, self._subscribed):
            connections.discard(connection)
        if not self._open:
            self._empty.set()

    async def _enter(self, sock: socket.socket) -> None:
        """Serve a new connection. Raises OSError if the peer has disconnected already."""
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
        """Send the error that the limit of clients is reached, and close the socket.

        The socket is not read first. PostgreSQL does the same if it cannot start another process.
        """
        # Yield to the other tasks, because many connections may arrive at once.
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
        """Read the catalogue's events and send them until ``stop``, across failovers of the catalogue.

        Cancelling alone does not end this loop reliably: before Python 3.12, ``wait_for`` loses a cancellation that
        coincides with its result.
        """
        connected_before = False
        while not stop.is_set():
            try:
                await self._begin(await self._catalogue.connect())
                connected_before = True
                while not stop.is_set():
                    await self._round()
            except (PgChangeError, psycopg.Error) as error:
                # After a first success, retry every error: a server that is being restored lacks its schema for a while.
                lost = isinstance(error, ServerUnavailable | psycopg.OperationalError)
                if not (lost or connected_before):
                    raise
                self._log_lost(f"{type(error).__name__}: {str(error).strip()}")
            await asyncio.sleep(RETRY)

    def _log_lost(self, reason: str) -> None:
        """Log that the catalogue is lost, once for each reason, not at every retry."""
        if reason != self._logged:
            log.warning("the connection to the catalogue is lost, will retry: %s", reason)
        self._logged = reason

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
        self._let_go(self._subscribed, "57P01", NEW_TERM)

    async def _round(self) -> None:
        """Poll once: send snapshots to new clients, send new events, and refresh clients with incomplete snapshots."""
        self._called.clear()
        if self._waiting:
            await self._welcome()
        at = self._at
        more = await self._send_events(at)
        # Clients that could not read earlier events need another query, from the slowest client's position. At most one
        # such query in a round, so that slow clients delay the others little.
        progress = [connection.progress for connection in self._subscribed if connection.takes]
        if progress and min(progress) < at:
            more = await self._send_events(min(progress)) or more
        if asyncio.get_running_loop().time() >= self._next_look:
            await self._refresh()
            self._next_look = asyncio.get_running_loop().time() + LOOK
        if not more:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._called.wait(), PAUSE)

    async def _send_events(self, after: Raft) -> bool:
        """Read one batch of events after ``after``, and send it to the clients that have all events before it.

        Returns whether there may be more events.
        """
        try:
            events = await self._catalogue.events(after)
        except HistoryTrimmed:
            self._at = max(self._at, await self._catalogue.now())
            self._let_go([each for each in self._subscribed if each.progress <= after], "57P01", TRIMMED)
            return True
        if events:
            self._publish(after, events)
            self._at = max(self._at, events[-1].raft)
        return len(events) == MOST_EVENTS

    async def _welcome(self) -> None:
        """Read one snapshot, and send it to all clients that were waiting before it was read."""
        waiting_before = self._waiting.copy()
        snapshot = await self._catalogue.snapshot()
        pieces = replies.cut(replies.notice(event) for event in snapshot.events)
        # No await from here on, so that no event is lost between the snapshot and the first events after it.
        welcomed = self._waiting & waiting_before
        self._waiting -= welcomed
        self._subscribed |= welcomed
        for connection in welcomed:
            connection.welcome(pieces, snapshot.raft, snapshot.lacking)

    async def _refresh(self) -> None:
        """Disconnect clients whose missing buckets have arrived, so that they reconnect and get a new snapshot.

        If a new snapshot is complete, this happens at once; else when the client's snapshot is older than
        ``refresh_interval``. So one long move does not hide the others for long, and many short moves do not each cost a
        snapshot.
        """
        lacking: defaultdict[Lacking, list[Connection]] = defaultdict(list)
        for connection in self._subscribed:
            if connection.lacking is not None:
                lacking[connection.lacking].append(connection)
        for buckets, connections in lacking.items():
            current = await self._catalogue.progress_of(buckets)
            for connection in connections:
                connection.lacking = current.lacking
            if current.arrived:
                due = [connection for connection in connections if current.settled or connection.is_due]
                self._let_go(due, "57P01", ARRIVED)

    def _publish(self, after: Raft, events: Sequence[Logged]) -> None:
        rafts = [event.raft for event in events]
        notices = [replies.notice(event.event) for event in events]
        cuts: dict[int, list[bytes]] = {}
        for connection in self._subscribed:
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
