"""Retry until an attempt succeeds. A session that waited for a lock instead would hold a snapshot while it waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from psycopg import errors

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""The first and the longest pause between two attempts, in seconds."""
DEADLOCK_TRIES = 5

Result = TypeVar("Result")


def succeeds(attempt: Callable[[], bool], timeout: float | None) -> bool:
    """Retry ``attempt`` until it succeeds or ``timeout`` has passed, and return whether it succeeded. None: no
    timeout."""
    ends = math.inf if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE
    while not attempt():
        left = ends - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def past_deadlocks(work: Callable[[], Result]) -> Result:
    """Call ``work`` and return its result. Retry if PostgreSQL cancels it to resolve a deadlock.

    PostgreSQL may also cancel a transaction that only waits behind the deadlock. ``work`` must be a transaction or a
    savepoint of its own. After DEADLOCK_TRIES attempts the last error is raised.
    """
    for attempt in range(1, DEADLOCK_TRIES):
        try:
            return work()
        except errors.DeadlockDetected:
            time.sleep(0.1 * attempt)
    return work()
