"""A timeout that does not count the time during which this event loop was blocked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context

SLICES = 30
"""The number of slices into which a timeout is divided."""


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer than ``seconds``, without the time during which the event loop was
    blocked.

    If other code blocks the loop, an answer that arrived in the meantime is read late. An ordinary timeout would then
    blame the server. Here a blocked loop uses up at most two slices of the timeout.
    """
    loop, slice_length = asyncio.get_running_loop(), seconds / SLICES
    async with asyncio.timeout(None) as deadline:

        async def count() -> None:
            left = seconds
            while left > 0:
                began = loop.time()
                await asyncio.sleep(min(slice_length, left))
                left -= min(loop.time() - began, 2 * slice_length)
            deadline.reschedule(loop.time())

        counting = asyncio.create_task(count(), name="pgchange-within", context=Context())
        try:
            yield
        finally:
            counting.cancel()
