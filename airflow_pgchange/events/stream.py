"""One client of an event stream: its position in the group's order, and its buffer."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from dataclasses import dataclass, field

from airflow_pgchange.errors import InvalidArgument

BEHIND_ALL = "~"
"""A text that sorts after every event id."""
FIRST_PORTION, LARGEST_PORTION = 10, 100
"""Number of missed events in one query: the first, and the maximum."""
POSITION = re.compile(r"(pm[0-9a-f]{22})?\.(pm[0-9a-f]{22})?\.([0-9a-f]{13})")


@dataclass(frozen=True, order=True)
class StreamPosition:
    """A position in the order of dispatch of a group: after an event of a slice, or after the whole slice.

    ``seen`` is the latest time, in microseconds of the server's clock, at which no later event existed. The text of a
    position is the id of a server-sent event.
    """

    slice: str
    event: str = BEHIND_ALL
    seen: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.slice}.{'' if self.event == BEHIND_ALL else self.event}.{self.seen:013x}"

    @classmethod
    def parse(cls, text: str) -> StreamPosition:
        """Parse the id of a server-sent event. Raises InvalidArgument if the text is not such an id."""
        match = POSITION.fullmatch(text)
        if match is None:
            raise InvalidArgument(
                f"Last-Event-ID {text!r:.100} was not sent by this server: connect without it to begin with new events"
            )
        return cls(match[1] or "", match[2] or BEHIND_ALL, int(match[3], 16))


def message(position: StreamPosition, data: str) -> bytes:
    """Return an event as a server-sent event. PostgreSQL's JSON has no line breaks, so it fits into one data line."""
    return f"id: {position}\ndata: {data}\n\n".encode()


def notice(kind: str, reason: str, position: StreamPosition | None = None) -> bytes:
    """Return a server-sent event about the stream itself. Without a position, the client keeps its last id."""
    moved = "" if position is None else f"id: {position}\n"
    return f"event: {kind}\n{moved}data: {json.dumps({'reason': reason})}\n\n".encode()


class Client:
    """The buffer of one client, at most about ``buffer`` bytes. A larger event is buffered alone.

    ``position`` is the position after all events that were buffered or replayed. ``portion`` is the number of missed
    events to read next. It doubles as long as the events fit into the buffer; else it is the number that fit. If the
    buffer is full, the client is dropped: its buffer is cleared, and the last message is the reason.
    """

    def __init__(self, subscription_id: str, position: StreamPosition, buffer: int) -> None:
        self.subscription_id = subscription_id
        self.position = position
        self.portion = FIRST_PORTION
        self.ended = False
        self._buffer = buffer
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def put(self, position: StreamPosition, text: bytes) -> None:
        """Buffer an event of the client's subscription, unless the client had it before."""
        if self.ended or position <= self.position:
            return
        if self._waiting and self._bytes + len(text) > self._buffer:
            self.drop(
                f"more than {self._buffer} bytes of events waited for you: read faster, then connect again, and "
                "what you have not seen comes again"
            )
            return
        self.position = position
        self._waiting.append(text)
        self._bytes += len(text)
        self._news.set()

    def drop(self, reason: str) -> None:
        """Clear the buffer, and end the stream with a reason."""
        self._waiting.clear()
        self._waiting.append(notice("dropped", reason))
        self.end()

    def end(self) -> None:
        """End the stream after the buffered events."""
        self.ended = True
        self._news.set()

    async def next(self, keep_alive: float) -> bytes | None:
        """Return the next buffered text; empty bytes after ``keep_alive`` seconds without any; None at the end."""
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
