"""Detect that a server shuts down, before it waits for its clients."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def on_ending(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` in the running event loop on SIGINT or SIGTERM, before the server's own signal handler.

    A server waits for open streams before it sends the application the shutdown event. So a stream that ends only on that
    event would block the shutdown forever. Does nothing outside the main thread, or if no Python handler is installed.
    """
    loop = asyncio.get_running_loop()
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)
        before[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        before = {number: old for number in SIGNALS if callable(old := signal.getsignal(number))}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, old)
