"""Live events for many clients over one connection to the database."""

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
from airflow_pgchange.events.stream import LARGEST_PORTION, Client, Place, message, notice
from airflow_pgchange.events.stream_log import StreamLog
from airflow_pgchange.events.subscriptions import LEAST_EXPIRY, Selection
from airflow_pgchange.feeds.checks import MOMENT, Seconds, check_count, check_group_name, seconds

log = logging.getLogger(__name__)

KEEP_EVERY = 5.0
"""Seconds between two signs of life for the subscriptions of the clients."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries to reach a server that is away."""
ANEW = "fetch anew what you need; from here on nothing is missing"


class EventStreams:
    """Streams of events to clients of this process; they run inside ``async with streams.running(): ...``.

    Each client gets the events of one selection; clients of the same selection share a subscription. They belong to
    ``group``, which must be for streams alone (several processes may share it): its cursor follows the time, so that
    what was dispatched longer than ``retention`` ago may be dropped. One connection serves all clients, and asks as
    often for one as for ten thousand.

    Guarantee: who connects again with the id that was last received loses nothing and gets nothing twice, unless more
    than ``replay_limit`` events or ``retention`` were missed, or the selection is a new one, of which nothing was kept:
    then an event of type ``gap`` says so, and the stream goes on with what comes. A client for which more than ``buffer``
    bytes wait is dropped, by an event of type ``dropped``; all are where this process was without the database until
    others of its group let go of what it had not read. Needs ``pgmb.grant_subscriber`` and ``pgmb.grant_consumer``.
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
        self._place = Place("")
        self._clients: dict[str, set[Client]] = defaultdict(set)
        self._count = 0
        self._keep_at = 0.0
        self._begun = False
        self._stopped = True

    @property
    def clients(self) -> int:
        """How many are connected."""
        return self._count

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while the block runs.

        Raises at once what is wrong with the database, and InvalidArgument for a group that somebody else reads.
        """
        await self._log.connect()
        try:
            self._place = await self._log.end()
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
        """End every stream behind what it has received, and take no more; for the event loop's thread."""
        self._stopped = True
        for clients in self._clients.values():
            for client in clients:
                client.end()

    @asynccontextmanager
    async def stream(
        self, selection: Selection, last: Place | None = None, keep_alive: Seconds = 15.0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The events of a selection as the text of server-sent events, behind ``last`` or from now on.

        After ``keep_alive`` without any comes a comment with an id. Raises TooManyClients, ServerUnavailable.
        """
        if not self._begun:
            log.warning(
                "the streams of group %s were never started: include their router in the application that the server "
                "starts; one that is mounted in another is not told of the start",
                self.group,
            )
        if self._stopped or self._count >= self._max_clients:
            why = "the streams do not run" if self._stopped else f"{self._max_clients} clients are connected"
            raise TooManyClients(f"{why}: try again later")
        self._count += 1
        client: Client | None = None
        try:
            async with self._one_at_a_time:
                # Whoever goes meanwhile does not end the question: the driver would close the connection of all.
                answer = await asyncio.shield(self._client(selection, last))
            client, first = answer
            yield self._texts(client, first, seconds("keep_alive", keep_alive))
        finally:
            self._count -= 1
            if client is not None:
                self._forget(client)

    async def _client(self, selection: Selection, last: Place | None) -> tuple[Client, bytes]:
        """A client at its place, and what it is told first: at least an id, from which it can connect again."""
        expiry = max(3 * self.retention, LEAST_EXPIRY)
        subscription_id, since = await self._log.subscribe(selection, expiry)
        gap = None if last is None else await self._gap(subscription_id, since, last)
        here = replace(self._place, seen=max(self._place.seen, since))
        place = here if last is None or gap is not None else last
        first = f"id: {place}\n\n".encode() if gap is None else notice("gap", gap, place)
        return Client(subscription_id, place, self._buffer), first

    async def _gap(self, subscription_id: str, since: int, last: Place) -> str | None:
        """Why what was missed is not replayed; None where it is."""
        most = self._replay_limit
        now, count, known = await self._log.count(subscription_id, last, self._place, most + 1)
        if now - last.seen > self.retention / MICROSECOND:
            why = f"you were away for longer than {self.retention}"
        elif count > most:
            why = f"you missed more than {most} events"
        elif not known:
            why = "your last id is of no event of this stream"
        elif last.seen < since:
            why = "your selection is another one than before, or was removed meanwhile"
        else:
            return None
        return f"{why}: {ANEW}"

    async def _texts(self, client: Client, first: bytes, keep_alive: float) -> AsyncIterator[bytes]:
        yield first
        while not self._stopped and client not in self._clients[client.subscription_id]:
            for text in await self._replayed(client):
                yield text
        if self._stopped:
            client.end()
        while (news := await client.next(keep_alive)) is not None:
            yield news or self._still_here(client)

    def _still_here(self, client: Client) -> bytes:
        """No event to the client, but it says later that it was here."""
        self._move_on(client)
        return f": still here\nid: {client.place}\n\n".encode()

    def _move_on(self, client: Client) -> None:
        client.place = max(client.place, self._place, key=lambda place: (place, place.seen))

    async def _replayed(self, client: Client) -> list[bytes]:
        """The next events that a client missed; when there are no more, or some are gone, it gets what comes."""
        texts: list[bytes] = []
        async with self._one_at_a_time:
            missed = await asyncio.shield(self._missed(client))
            if missed is None:
                self._move_on(client)
                missed, why = [], "what you missed was let go of before you had read it"
                texts.append(notice("gap", f"{why}: {ANEW}", client.place))
            for number, (place, data) in enumerate(missed):
                if data is not None:
                    if texts and sum(map(len, texts)) + len(data) > self._buffer:
                        client.portion = number
                        return texts
                    texts.append(message(place, data))
                client.place = place
            if len(missed) < client.portion:
                self._clients[client.subscription_id].add(client)
            client.portion = min(2 * client.portion, LARGEST_PORTION)
        return texts

    async def _missed(self, client: Client) -> list[tuple[Place, str | None]] | None:
        """The next events that a client missed; None where some may be gone, as they are while a slow one reads."""
        missed = await self._log.missed(client.subscription_id, client.place, self._place, client.portion)
        # Asked last: what was let go of until now may be lacking in what was read.
        return None if await self._log.passed(client.place) else missed

    def _forget(self, client: Client) -> None:
        clients = self._clients[client.subscription_id]
        clients.discard(client)
        if not clients:
            del self._clients[client.subscription_id]

    async def _watch(self) -> None:
        """Follow the group until cancelled, however often the server goes away meanwhile."""
        pause = self._poll_interval
        try:
            while True:
                await asyncio.sleep(pause)
                try:
                    async with self._one_at_a_time:
                        pause = 0 if await self._look() else self._poll_interval
                except (PgChangeError, psycopg.Error) as error:
                    log.warning("the streams of group %s wait for the database: %s", self.group, error)
                    await self._log.disconnect()
                    pause = min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
        finally:
            self.stop()

    async def _look(self) -> bool:
        """Hand out the next events; False where there were none."""
        if self._log.lost:
            await self._log.connect()
            self._keep_at = 0.0
        if time.monotonic() >= self._keep_at:
            await self._keep()
        events = await self._log.live(self._place)
        for place, subscription_ids, data in events:
            if data is None:
                log.warning("group %s: event %s was deleted before it was sent", self.group, place.event)
            else:
                self._hand_out(place, subscription_ids, message(place, data))
        if events:
            last = events[-1][0]
            self._place = Place(last.slice, seen=max(self._place.seen, last.seen))
            return True
        now, dispatched = await self._log.dispatch()
        if not dispatched:
            self._place = replace(self._place, seen=max(self._place.seen, now))
        return dispatched > 0

    def _hand_out(self, place: Place, subscription_ids: list[str], text: bytes) -> None:
        for subscription_id in subscription_ids:
            for client in self._clients.get(subscription_id, ()):
                client.put(place, text)

    async def _keep(self) -> None:
        if await self._log.passed(self._place):
            for clients in self._clients.values():
                for client in clients:
                    client.drop("this server was without the database for too long: connect again")
            self._place = await self._log.end()
        used = list(self._clients)
        kept = await self._log.keep(used, self._place, self.retention)
        for gone in set(used) - kept:
            for client in self._clients.get(gone, ()):
                client.drop("your subscription expired while the database was away: connect again")
        self._keep_at = time.monotonic() + KEEP_EVERY
