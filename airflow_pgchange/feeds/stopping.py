"""Ask a long operation to stop."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any


class Stop:
    """A request to stop. Call it to learn whether somebody has asked.

    The request can come from another thread or from a signal handler, in which a threading.Event could deadlock. Airflow
    copies tasks: a copy is a new object without a request.
    """

    def __init__(self) -> None:
        self._is_requested = False
        self._wake_ups: SimpleQueue[None] = SimpleQueue()

    def __call__(self) -> bool:
        return self._is_requested

    def __deepcopy__(self, memo: dict[int, Any]) -> Stop:
        return Stop()

    def ask(self) -> None:
        """Ask to stop, and end a ``rest`` at once."""
        self._is_requested = True
        self._wake_ups.put(None)

    def rest(self, seconds: float) -> None:
        """Sleep for some seconds, or until somebody asks to stop."""
        if not self._is_requested and seconds > 0:
            with suppress(Empty):
                self._wake_ups.get(timeout=seconds)
