"""Timeouts for what others do, in an event loop that may itself be blocked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context

SLICES = 30
"""The time is counted in so many slices."""


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer than ``seconds`` in which this event loop ran.

    If something blocks the loop, an answer that came meanwhile is read late. So a blocked loop costs the block two slices
    of its time at most, and nobody is blamed for an answer that lay there unread.
    """
    loop, piece = asyncio.get_running_loop(), seconds / SLICES
    async with asyncio.timeout(None) as deadline:

        async def count() -> None:
            left = seconds
            while left > 0:
                began = loop.time()
                await asyncio.sleep(min(piece, left))
                left -= min(loop.time() - began, 2 * piece)
            deadline.reschedule(loop.time())

        counting = asyncio.create_task(count(), name="pgchange-within", context=Context())
        try:
            yield
        finally:
            counting.cancel()
