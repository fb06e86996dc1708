"""Asking something that takes its time to stop."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any


class Stop:
    """Whether somebody asked to stop: from another thread, or from a signal's handler, where an Event could deadlock.

    A copy, as Airflow makes of a task, is one of its own that nobody has asked.
    """

    def __init__(self) -> None:
        self._asked = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def __call__(self) -> bool:
        return self._asked

    def __deepcopy__(self, memo: dict[int, Any]) -> Stop:
        return Stop()

    def ask(self) -> None:
        """Ask to stop: whoever rests goes on at once."""
        self._asked = True
        self._told.put(None)

    def rest(self, seconds: float) -> None:
        """Rest for so long, or until somebody asks to stop."""
        if not self._asked and seconds > 0:
            with suppress(Empty):
                self._told.get(timeout=seconds)
