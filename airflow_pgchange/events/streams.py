"""Stream live events to many clients over one database connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import psycopg

from airflow_pgchange.errors import PgChangeError, TooManyClients
from airflow_pgchange.events.event import MICROSECOND
from airflow_pgchange.events.stream import LARGEST_PORTION, Client, StreamPosition, message, notice
from airflow_pgchange.events.stream_log import StreamLog
from airflow_pgchange.events.subscriptions import LEAST_EXPIRY, Selection
from airflow_pgchange.feeds.argument_checks import MOMENT, Seconds, check_count, check_group_name, seconds

log = logging.getLogger(__name__)

KEEP_EVERY = 5.0
"""Seconds between two heartbeats of the clients' subscriptions."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Initial and maximum delay in seconds before the streams reconnect to an unavailable server."""
ANEW = "fetch anew what you need; from here on nothing is missing"


class EventStreams:
    """Streams events to clients of this process, inside ``async with streams.running(): ...``.

    Each client gets the events of one selection. Clients with the same selection share a subscription. All subscriptions
    belong to ``group``, which must not have other readers; several processes may share it. The group's cursor follows the
    clock, so events that were dispatched longer than ``retention`` ago may be trimmed. One connection serves all clients;
    the number of its queries does not grow with the number of clients.

    Guarantee: a client that reconnects with its last event id misses nothing and gets nothing twice. There are three
    exceptions: it missed more than ``replay_limit`` events, it was away longer than ``retention``, or its selection is
    new. Then it gets an event of type ``gap``, and the stream continues with new events.

    A client whose backlog exceeds ``buffer`` bytes is dropped with an event of type ``dropped``. While this process has
    no database, other processes of the group may trim events that it has not read. Then all of its clients are dropped.
    Needs ``pgmb.grant_subscriber`` and ``pgmb.grant_consumer``.
    """

    def __init__(
        self,
        conninfo: str,
        group: str,
        *,
        replay_limit: int = 1000,
        retention: Seconds = timedelta(minutes=5),
        buffer: int = 2**20,
        max_clients: int = 10_000,
        poll_interval: Seconds = 0.1,
    ) -> None:
        check_group_name(group)
        check_count("replay_limit", replay_limit)
        check_count("buffer", buffer)
        check_count("max_clients", max_clients)
        self.group = group
        self.retention = timedelta(seconds=seconds("retention", retention, least=MOMENT))
        self._replay_limit = replay_limit
        self._buffer = buffer
        self._max_clients = max_clients
        self._poll_interval = seconds("poll_interval", poll_interval)
        self._log = StreamLog(conninfo, group)
        self._one_at_a_time = asyncio.Lock()
        self._position = StreamPosition("")
        self._clients: dict[str, set[Client]] = defaultdict(set)
        self._count = 0
        self._keep_at = 0.0
        self._begun = False
        self._stopped = True

    @property
    def clients(self) -> int:
        """The number of connected clients."""
        return self._count

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve clients while the block runs.

        Raises the database's error if it cannot be used at the start, and InvalidArgument if the group has other readers.
        """
        await self._log.connect()
        try:
            self._position = await self._log.end()
            self._begun = True
            self._stopped = False
            watching = asyncio.create_task(self._watch(), name="pgchange-event-streams")
            try:
                yield
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
        finally:
            await self._log.disconnect()

    def stop(self) -> None:
        """End every stream after its buffered events, and accept no new clients. Call it in the event loop's thread."""
        self._stopped = True
        for clients in self._clients.values():
            for client in clients:
                client.end()

    @asynccontextmanager
    async def stream(
        self, selection: Selection, last: StreamPosition | None = None, keep_alive: Seconds = 15.0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Stream the events of a selection as server-sent events, after the position ``last`` or from now on.

        After ``keep_alive`` without an event, a comment with an id is sent. Raises TooManyClients and ServerUnavailable.
        """
        if not self._begun:
            log.warning(
                "the streams of group %s were never started: include their router in the application that the server "
                "starts. A mounted sub-application does not get the start event",
                self.group,
            )
        if self._stopped or self._count >= self._max_clients:
            reason = (
                "the streams do not run" if self._stopped else f"{self._max_clients} clients are connected"
            )
            raise TooManyClients(f"{reason}: try again later")
        self._count += 1
        client: Client | None = None
        try:
            async with self._one_at_a_time:
                # Shield the query: if this client disconnects, cancelling it would close the connection of all clients.
                client_and_first = await asyncio.shield(self._client(selection, last))
            client, first = client_and_first
            yield self._texts(client, first, seconds("keep_alive", keep_alive))
        finally:
            self._count -= 1
            if client is not None:
                self._forget(client)

    async def _client(self, selection: Selection, last: StreamPosition | None) -> tuple[Client, bytes]:
        """Return a client at its position, and its first message, which has at least an id to reconnect with."""
        expiry = max(3 * self.retention, LEAST_EXPIRY)
        subscription_id, since = await self._log.subscribe(selection, expiry)
        gap = None if last is None else await self._gap(subscription_id, since, last)
        here = replace(self._position, seen=max(self._position.seen, since))
        position = here if last is None or gap is not None else last
        first = f"id: {position}\n\n".encode() if gap is None else notice("gap", gap, position)
        return Client(subscription_id, position, self._buffer), first

    async def _gap(self, subscription_id: str, since: int, last: StreamPosition) -> str | None:
        """Return the reason why missed events cannot be replayed; None if they can."""
        most = self._replay_limit
        now, count, reached = await self._log.count(subscription_id, last, self._position, most + 1)
        if now - last.seen > self.retention / MICROSECOND:
            reason = f"you were away for longer than {self.retention}"
        elif count > most:
            reason = f"you missed more than {most} events"
        elif not reached:
            reason = "your last id does not belong to this stream"
        elif last.seen < since:
            reason = "your selection is another one than before, or was removed meanwhile"
        else:
            return None
        return f"{reason}: {ANEW}"

    async def _texts(self, client: Client, first: bytes, keep_alive: float) -> AsyncIterator[bytes]:
        yield first
        while not self._stopped and client not in self._clients[client.subscription_id]:
            for text in await self._replayed(client):
                yield text
        if self._stopped:
            client.end()
        while (queued := await client.next(keep_alive)) is not None:
            yield queued or self._keep_alive_comment(client)

    def _keep_alive_comment(self, client: Client) -> bytes:
        """Return a comment with the current id. It lets the client reconnect from here although it got no event."""
        self._move_on(client)
        return f": still here\nid: {client.position}\n\n".encode()

    def _move_on(self, client: Client) -> None:
        client.position = max(client.position, self._position, key=lambda position: (position, position.seen))

    async def _replayed(self, client: Client) -> list[bytes]:
        """Return the next events that a client missed. If there are no more, or some are gone, switch to live events."""
        texts: list[bytes] = []
        async with self._one_at_a_time:
            missed = await asyncio.shield(self._missed(client))
            if missed is None:
                self._move_on(client)
                missed, reason = [], "what you missed was let go of before you had read it"
                texts.append(notice("gap", f"{reason}: {ANEW}", client.position))
            for number, (position, data) in enumerate(missed):
                if data is not None:
                    if texts and sum(map(len, texts)) + len(data) > self._buffer:
                        client.portion = number
                        return texts
                    texts.append(message(position, data))
                client.position = position
            if len(missed) < client.portion:
                self._clients[client.subscription_id].add(client)
            client.portion = min(2 * client.portion, LARGEST_PORTION)
        return texts

    async def _missed(self, client: Client) -> list[tuple[StreamPosition, str | None]] | None:
        """Return the next events that a client missed; None if the log was trimmed beyond the client's position."""
        missed = await self._log.missed(
            client.subscription_id, client.position, self._position, client.portion
        )
        # Check after the query, because events may be trimmed until the query reads them.
        return None if await self._log.passed(client.position) else missed

    def _forget(self, client: Client) -> None:
        clients = self._clients[client.subscription_id]
        clients.discard(client)
        if not clients:
            del self._clients[client.subscription_id]

    async def _watch(self) -> None:
        """Poll the group until cancelled, and reconnect whenever the database is lost."""
        pause = self._poll_interval
        try:
            while True:
                await asyncio.sleep(pause)
                try:
                    async with self._one_at_a_time:
                        pause = 0 if await self._poll() else self._poll_interval
                except (PgChangeError, psycopg.Error) as error:
                    log.warning("the streams of group %s wait for the database: %s", self.group, error)
                    await self._log.disconnect()
                    pause = min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
        finally:
            self.stop()

    async def _poll(self) -> bool:
        """Give the next events to the clients. Return False if there were none."""
        if self._log.lost:
            await self._log.connect()
            self._keep_at = 0.0
        if time.monotonic() >= self._keep_at:
            await self._keep()
        events = await self._log.live(self._position)
        for position, subscription_ids, data in events:
            if data is None:
                log.warning("group %s: event %s was deleted before it was sent", self.group, position.event)
            else:
                self._hand_out(position, subscription_ids, message(position, data))
        if events:
            last = events[-1][0]
            self._position = StreamPosition(last.slice, seen=max(self._position.seen, last.seen))
            return True
        now, dispatched = await self._log.dispatch()
        if not dispatched:
            self._position = replace(self._position, seen=max(self._position.seen, now))
        return dispatched > 0

    def _hand_out(self, position: StreamPosition, subscription_ids: list[str], text: bytes) -> None:
        for subscription_id in subscription_ids:
            for client in self._clients.get(subscription_id, ()):
                client.put(position, text)

    async def _keep(self) -> None:
        if await self._log.passed(self._position):
            for clients in self._clients.values():
                for client in clients:
                    client.drop("this server had no database connection for too long: connect again")
            self._position = await self._log.end()
        used = list(self._clients)
        kept_ids = await self._log.keep(used, self._position, self.retention)
        for gone in set(used) - kept_ids:
            for client in self._clients.get(gone, ()):
                client.drop("your subscription expired while the database was away: connect again")
        self._keep_at = time.monotonic() + KEEP_EVERY
