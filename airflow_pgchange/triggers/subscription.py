"""One subscriber of a poller: the news it is given, and when it is looked at again. No I/O and no clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from airflow_pgchange.errors import ConsumerBusy, PgChangeError
from airflow_pgchange.feeds.error_text import without_secrets
from airflow_pgchange.triggers.last_seen import Seen, Sight
from airflow_pgchange.triggers.watches import Payload, Watch

FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0
REST = 2.0
"""How many times as long as a look took nobody asks again, up to the longest rest: a third of a backend's time."""
LONGEST_REST = 2.0
"""Seconds; for who asks seldom ``INTERVALS`` of his."""
INTERVALS = 10


@dataclass(frozen=True)
class Trouble:
    """A question could not be answered; it is asked again in ``retry_in`` seconds."""

    error: PgChangeError
    retry_in: float


@dataclass(frozen=True)
class Recovered:
    """The first answer after trouble."""


News = Payload | Trouble | Recovered


@dataclass(eq=False)
class Subscription:
    """One subscriber: iterate over it for the news. ``apart``: it could not be answered among others."""

    watch: Watch
    interval: float
    queue: asyncio.Queue[News | BaseException] = field(default_factory=asyncio.Queue)
    due_at: float = float("-inf")
    retry_in: float = FIRST_RETRY
    failing_since: float | None = None
    apart: bool = False
    sight: Sight = field(default_factory=Sight)

    def __aiter__(self) -> AsyncIterator[News]:
        return self._news()

    async def _news(self) -> AsyncIterator[News]:
        while True:
            item = await self.queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    @property
    def longest_rest(self) -> float:
        """Seconds for which an event may stay unseen, however long a look took or a lock was held."""
        return max(INTERVALS * self.interval, LONGEST_REST)

    def fail(self, error: PgChangeError, now: float) -> None:
        longest = self.longest_rest if isinstance(error, ConsumerBusy) else LONGEST_RETRY
        pause = min(self.retry_in, longest)
        self.queue.put_nowait(Trouble(error, pause))
        self.failing_since = now if self.failing_since is None else self.failing_since
        # A lock is mostly held for a moment.
        if not isinstance(error, ConsumerBusy) or now - self.failing_since >= LONGEST_RETRY:
            self.watch.failed()
        self.sight.seen = Seen(error=without_secrets(str(error), ()))
        self.due_at = now + pause
        self.retry_in = min(2 * pause, LONGEST_RETRY)

    def answered(self, answer: Any, now: float, took: float) -> None:
        self.sight.seen = Seen(ready=answer.get("ready") if isinstance(answer, dict) else None)
        if self.failing_since is not None:
            self.queue.put_nowait(Recovered())
        self.failing_since, self.apart, self.retry_in = None, False, FIRST_RETRY
        self.due_at = now + max(self.interval - took, min(REST * took, self.longest_rest))
