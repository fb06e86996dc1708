"""One client of the event log: where it is in a group's order, and what waits to be sent to it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from dataclasses import dataclass, field

from airflow_pgchange.errors import InvalidArgument

BEHIND_ALL = "~"
"""Sorts behind the id of every event."""
FIRST_PORTION, LARGEST_PORTION = 10, 100
"""Missed events that are read at once."""
PLACE = re.compile(r"(pm[0-9a-f]{22})?\.(pm[0-9a-f]{22})?\.([0-9a-f]{13})")


@dataclass(frozen=True, order=True)
class Place:
    """A place in the order of dispatch of a group: behind an event of a slice, or behind all of the slice.

    ``seen`` are the microseconds, by the server's clock, at which nothing further was known to be there. As text it is
    the id of a server-sent event.
    """

    slice: str
    event: str = BEHIND_ALL
    seen: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.slice}.{'' if self.event == BEHIND_ALL else self.event}.{self.seen:013x}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises InvalidArgument for a text that is not an id of ours."""
        found = PLACE.fullmatch(text)
        if found is None:
            raise InvalidArgument(
                f"Last-Event-ID {text!r:.100} was not sent by this server: connect without it to begin with new events"
            )
        return cls(found[1] or "", found[2] or BEHIND_ALL, int(found[3], 16))


def message(place: Place, data: str) -> bytes:
    """An event of the log; JSON as PostgreSQL writes it has no line breaks."""
    return f"id: {place}\ndata: {data}\n\n".encode()


def notice(kind: str, reason: str, place: Place | None = None) -> bytes:
    """Something about the stream itself, by an event of that type. Without a place the client stays where it is."""
    moved = "" if place is None else f"id: {place}\n"
    return f"event: {kind}\n{moved}data: {json.dumps({'reason': reason})}\n\n".encode()


class Client:
    """What waits for one client, at most about ``buffer`` bytes; an event larger than that waits alone.

    ``place`` is behind all that was put or replayed, ``portion`` how many of the events that it missed are read next: as
    many as it had room for, twice as many where there was more. A client that has no room for an event is dropped: what
    waits is forgotten, and the last it gets is why.
    """

    def __init__(self, subscription_id: str, place: Place, buffer: int) -> None:
        self.subscription_id = subscription_id
        self.place = place
        self.portion = FIRST_PORTION
        self.ended = False
        self._buffer = buffer
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def put(self, place: Place, text: bytes) -> None:
        """An event of its subscription; one that it had before is left out."""
        if self.ended or place <= self.place:
            return
        if self._waiting and self._bytes + len(text) > self._buffer:
            self.drop(
                f"more than {self._buffer} bytes of events waited for you: read faster, then connect again, and "
                "what you have not seen comes again"
            )
            return
        self.place = place
        self._waiting.append(text)
        self._bytes += len(text)
        self._news.set()

    def drop(self, reason: str) -> None:
        """End it with a reason."""
        self._waiting.clear()
        self._waiting.append(notice("dropped", reason))
        self.end()

    def end(self) -> None:
        """Let it have what waits, and no more."""
        self.ended = True
        self._news.set()

    async def next(self, keep_alive: float) -> bytes | None:
        """What waits; empty if nothing came for so many seconds; None at the end."""
        if not self._waiting and not self.ended:
            try:
                async with asyncio.timeout(keep_alive):
                    await self._news.wait()
            except TimeoutError:
                return b""
        if not self._waiting:
            return None
        text = self._waiting.popleft()
        self._bytes -= len(text)
        if not self._waiting and not self.ended:
            self._news.clear()
        return text
