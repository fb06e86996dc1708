"""Trying again until it works. A session that waited for a lock instead would hold a snapshot all the while."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two tries."""


def succeeds(attempt: Callable[[], bool], wait: float | None) -> bool:
    """Whether an attempt succeeds: the first, which is made at once, or one within ``wait`` seconds, None: whenever."""
    ends = math.inf if wait is None else time.monotonic() + wait
    pause = FIRST_PAUSE
    while not attempt():
        left = ends - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)
    return True
