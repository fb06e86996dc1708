"""One subscriber of a poller: its news, and when its question is due again. This module has no I/O and no clock."""

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
"""After a query, the rest is this many times as long as the query took, up to the longest rest. So polling takes at most
a third of a backend's time."""
LONGEST_REST = 2.0
"""The longest rest in seconds. If ``INTERVALS`` intervals of the subscription are longer, these are the longest rest."""
INTERVALS = 10


@dataclass(frozen=True)
class Trouble:
    """The question could not be answered, and is asked again in ``retry_in`` seconds."""

    error: PgChangeError
    retry_in: float


@dataclass(frozen=True)
class Recovered:
    """The first answer after trouble."""


News = Payload | Trouble | Recovered


@dataclass(eq=False)
class Subscription:
    """One subscriber. Iterate over it for its news. ``apart``: its question failed among others, and is now asked
    alone."""

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
        """The longest pause in seconds until the next query, however long the last query took or a lock was held."""
        return max(INTERVALS * self.interval, LONGEST_REST)

    def fail(self, error: PgChangeError, now: float) -> None:
        longest = self.longest_rest if isinstance(error, ConsumerBusy) else LONGEST_RETRY
        pause = min(self.retry_in, longest)
        self.queue.put_nowait(Trouble(error, pause))
        self.failing_since = now if self.failing_since is None else self.failing_since
        # Most locks are held for a moment only, so report a failure to the watch only if one lasts.
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
