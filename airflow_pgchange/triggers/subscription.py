"""A subscriber of a poller: its news, and when its query is due again. This module has no I/O and no clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from airflow_pgchange.errors import ConsumerBusy, PgChangeError
from airflow_pgchange.feeds.error_text import without_secrets
from airflow_pgchange.triggers.observations import Observation, Observations
from airflow_pgchange.triggers.watch_queries import Payload, Watch

FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0
REST = 2.0
"""After a query, the rest is this many times as long as the query took, up to the longest rest. So polling takes at most
a third of a backend's time."""
LONGEST_REST = 2.0
"""The longest rest after a query in seconds, or ``INTERVALS`` poll intervals of the subscription if they are longer."""
INTERVALS = 10


@dataclass(frozen=True)
class Failure:
    """The query failed, and is retried in ``retry_in`` seconds."""

    error: PgChangeError
    retry_in: float


@dataclass(frozen=True)
class Recovered:
    """The query succeeded again after a failure."""


News = Payload | Failure | Recovered


@dataclass(eq=False)
class Subscription:
    """A subscriber. Iterate over it for its news. ``apart``: its query failed together with others, so it is now sent
    alone."""

    watch: Watch
    interval: float
    queue: asyncio.Queue[News | BaseException] = field(default_factory=asyncio.Queue)
    due_at: float = float("-inf")
    retry_in: float = FIRST_RETRY
    failing_since: float | None = None
    apart: bool = False
    observations: Observations = field(default_factory=Observations)

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
        """The longest pause in seconds until the next query, after a slow query or a lock."""
        return max(INTERVALS * self.interval, LONGEST_REST)

    def fail(self, error: PgChangeError, now: float) -> None:
        longest = self.longest_rest if isinstance(error, ConsumerBusy) else LONGEST_RETRY
        pause = min(self.retry_in, longest)
        self.queue.put_nowait(Failure(error, pause))
        self.failing_since = now if self.failing_since is None else self.failing_since
        # Most locks are held only briefly, so a lock counts as a failure of the watch only if it lasts.
        if not isinstance(error, ConsumerBusy) or now - self.failing_since >= LONGEST_RETRY:
            self.watch.failed()
        self.observations.latest = Observation(error=without_secrets(str(error), ()))
        self.due_at = now + pause
        self.retry_in = min(2 * pause, LONGEST_RETRY)

    def answered(self, answer: Any, now: float, took: float) -> None:
        self.observations.latest = Observation(
            ready=answer.get("ready") if isinstance(answer, dict) else None
        )
        if self.failing_since is not None:
            self.queue.put_nowait(Recovered())
        self.failing_since, self.apart, self.retry_in = None, False, FIRST_RETRY
        self.due_at = now + max(self.interval - took, min(REST * took, self.longest_rest))
