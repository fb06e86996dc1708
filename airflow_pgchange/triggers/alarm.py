"""When a backlog deserves a wake-up: decisions only, no I/O and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_pgchange.feeds.batch import Lag

FIRST_PAUSE = 30.0
"""Seconds to the first repeat: longer than Airflow takes from an event to a task that holds the consumer's
lock.
"""
LONGEST_PAUSE = 300.0
"""Seconds between two repeats, at most."""
SETTLE = 0.5
"""Seconds of silence after progress: a consumer that drains lets go of its lock between two batches."""
LOOK_AGAIN = 1.0
"""Seconds between two looks at a lock that is held."""


@dataclass
class Alarm:
    """Rings for ``min_changes`` ready changes, or for a ready change that is ``max_age`` seconds old.

    It rings once for a backlog, and again with longer and longer pauses while the consumer makes no progress.
    Times are seconds of any clock that does not go backwards; the caller gives them.
    """

    min_changes: int = 1
    max_age: float | None = None
    _position: Mapping[str, Any] | None = field(default=None, init=False)
    _looked: bool = field(default=False, init=False)
    _quiet_until: float = field(default=float("-inf"), init=False)
    _held: bool = field(default=False, init=False)
    _pause: float = field(default=FIRST_PAUSE, init=False)

    def due(self, position: Mapping[str, Any] | None, lag: Lag, now: float) -> bool:
        """Whether to ring now, if no consumer is at work."""
        if lag.ready == 0:
            self._start_over(position, now)
            return False
        if self._looked and position != self._position:
            self._start_over(position, now + SETTLE)
        self._position, self._looked = position, True
        return now >= self._quiet_until and self._enough(lag)

    def at_work(self, now: float) -> None:
        """A consumer holds the lock: look again soon, and ring only when it has let go."""
        self._held = True
        self._quiet_until = now + LOOK_AGAIN

    def idle(self, now: float) -> bool:
        """No consumer holds the lock: whether to ring. One that has just let go without progress has failed:
        wait.
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
        self._position, self._looked, self._held = position, True, False
        self._quiet_until, self._pause = quiet_until, FIRST_PAUSE

    def _hush(self, now: float) -> None:
        self._quiet_until = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
