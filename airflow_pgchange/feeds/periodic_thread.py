"""A step that is repeated in a thread of its own while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from airflow_pgchange.feeds.argument_checks import Seconds, seconds


@contextmanager
def repeated(step: Callable[[], bool], poll_interval: Seconds, name: str) -> Iterator[None]:
    """Call ``step`` every ``poll_interval`` while the block runs, as long as it returns True.

    The end of the block waits for a call that has begun. ``name`` is that of the thread.
    """
    rest = seconds("poll_interval", poll_interval)
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(rest) and step():
            pass

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
