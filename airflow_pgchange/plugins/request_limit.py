"""A limit on the requests that hold a thread of Airflow's API server, because all routes of the server share them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from anyio import Semaphore, fail_after
from fastapi import HTTPException, Request

from airflow_pgchange.utils.compat import left_before_the_answer

WAITING = 100
"""Maximum number of waiting requests. More are refused."""
PATIENCE = 5.0
"""Maximum number of seconds for which a request waits."""


@dataclass
class RequestLimit:
    """Admits at most ``places`` requests at once. Others wait at most ``PATIENCE`` seconds, and hold no thread."""

    places: int
    _slots: Semaphore = field(init=False)
    _waiting: int = 0

    def __post_init__(self) -> None:
        self._slots = Semaphore(self.places)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Hold a place while the block runs. Raises HTTPException 503 if no place is free in time."""
        if self._waiting >= WAITING:
            raise _crowded()
        self._waiting += 1
        try:
            with fail_after(PATIENCE):
                await self._slots.acquire()
        except TimeoutError:
            raise _crowded() from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()


@dataclass
class RequestLimits:
    """The limits for reads, which take at most about a second, and for actions, which take up to a minute.

    Both together leave Airflow 20 of its 40 threads.
    """

    reads: RequestLimit = field(default_factory=lambda: RequestLimit(14))
    actions: RequestLimit = field(default_factory=lambda: RequestLimit(6))


def limited(name: Literal["reads", "actions"]) -> Any:
    """Return a dependency that makes a route wait for a place. Put it after the dependencies that check rights."""

    async def enter(request: Request) -> AsyncIterator[None]:
        limits: RequestLimits = request.app.state.request_limits
        async with getattr(limits, name).entered():
            yield

    return left_before_the_answer(enter)


def _crowded() -> HTTPException:
    return HTTPException(
        503, "the page has too many requests in progress: try again in some seconds", {"Retry-After": "5"}
    )
