"""Decide when a backlog wakes a consumer. This module has no I/O and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_pgchange.feeds.batch import Lag

FIRST_PAUSE = 30.0
"""Seconds until the first repetition. Airflow needs less time from an event to a task that holds the consumer's lock."""
LONGEST_PAUSE = 300.0
"""The longest pause between two repetitions, in seconds."""
SETTLE = 0.5
"""Seconds without an alarm after progress, because a consumer that drains releases its lock between two batches."""
LOOK_AGAIN = 1.0
"""Seconds until a lock that is held is checked again."""


@dataclass
class Alarm:
    """Rings for ``min_changes`` ready changes, or for a ready change that is ``max_age`` seconds old.

    It rings once for a backlog, and again after growing pauses while the consumer makes no progress. The caller passes
    the time, in seconds of any clock that does not go backwards.
    """

    min_changes: int = 1
    max_age: float | None = None
    _position: Mapping[str, Any] | None = field(default=None, init=False)
    _has_position: bool = field(default=False, init=False)
    _quiet_until: float = field(default=float("-inf"), init=False)
    _held: bool = field(default=False, init=False)
    _pause: float = field(default=FIRST_PAUSE, init=False)

    def due(self, position: Mapping[str, Any] | None, lag: Lag, now: float) -> bool:
        """Whether the alarm is due. The caller then checks the lock, and calls ``at_work`` or ``idle``."""
        if lag.ready == 0:
            self._start_over(position, now)
            return False
        if self._has_position and position != self._position:
            self._start_over(position, now + SETTLE)
        self._position, self._has_position = position, True
        return now >= self._quiet_until and self._enough(lag)

    def at_work(self, now: float) -> None:
        """Record that a consumer holds the lock: do not fire now, and check again after ``LOOK_AGAIN``."""
        self._held = True
        self._quiet_until = now + LOOK_AGAIN

    def idle(self, now: float) -> bool:
        """Record that no consumer holds the lock, and return whether to fire.

        A consumer that has just released the lock without progress has failed. Then the next alarm is put off.
        """
        if self._held:
            self._held = False
            self._hush(now)
            return False
        self._hush(now)
        return True

    def _enough(self, lag: Lag) -> bool:
        old = self.max_age is not None and lag.ready_age is not None and lag.ready_age >= self.max_age
        return lag.ready >= self.min_changes or old

    def _start_over(self, position: Mapping[str, Any] | None, quiet_until: float) -> None:
        self._position, self._has_position, self._held = position, True, False
        self._quiet_until, self._pause = quiet_until, FIRST_PAUSE

    def _hush(self, now: float) -> None:
        self._quiet_until = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
