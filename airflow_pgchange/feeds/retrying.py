"""Trying again until it works. A session that waited for a lock instead would hold a snapshot all the while."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from psycopg import errors

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two tries."""
DEADLOCK_TRIES = 5

Result = TypeVar("Result")


def succeeds(attempt: Callable[[], bool], timeout: float | None) -> bool:
    """Whether an attempt succeeds: the first, which is made at once, or one within ``timeout``, None: whenever."""
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
    """What ``work`` returns, done anew where PostgreSQL ends it to let others out of a deadlock: that may be one who only
    waited behind them. It must be a transaction or a savepoint of its own. Raises the last of DEADLOCK_TRIES such errors.
    """
    for attempt in range(1, DEADLOCK_TRIES):
        try:
            return work()
        except errors.DeadlockDetected:
            time.sleep(0.1 * attempt)
    return work()
