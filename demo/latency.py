"""Measure the time from commit to result, by counting changes at both ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

import psycopg

EVERY = 0.1
"""Seconds between two queries of the result: the precision of the figures."""
IN_RESULT = "select coalesce(sum(departures + arrivals + cancellations), 0)::bigint from public.route_delay"


class Latency:
    """Changes are processed in the order of their commits. So the thousandth commit is in the result when the result
    has a thousand changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._commits: list[tuple[float, int]] = []
        self._results: list[tuple[float, int]] = []

    def committed(self, count: int) -> None:
        """Note the number of changes that were just committed. Can be called from any thread."""
        self._commits.append((self._clock(), count))

    def in_result(self, total: int) -> None:
        """Note the number of changes that are now in the result."""
        if not self._results or total > self._results[-1][1]:
            self._results.append((self._clock(), total))

    @property
    def last_commit(self) -> float:
        return max((moment for moment, _ in self._commits), default=self._clock())

    def percentiles(self, *shares: float, started: bool = False) -> list[float]:
        """Return for each share of the changes in the result the seconds from their commit to the result.

        With ``started`` only changes count that were committed after the first result. Return an empty list if there
        are none.
        """
        since = next((moment for moment, total in self._results if total), math.inf) if started else 0.0
        took = sorted((seconds, count) for committed, seconds, count in self._took() if committed >= since)
        total = sum(count for _, count in took)
        return [_reached(took, share * total) for share in shares] if took else []

    def report(self) -> str:
        """Return a text with the times from commit to result. Times that were not measured are left out."""
        each = self.percentiles(0.5, 0.95)
        if not each:
            return "no change came to the result"
        text = "commit to result: p50 {:.1f} s, p95 {:.1f} s".format(*each)
        later = self.percentiles(0.5, 0.95, started=True)
        return text + (
            "; of changes after the first result {:.1f} and {:.1f} s".format(*later) if later else ""
        )

    def _took(self) -> Iterator[tuple[float, float, int]]:
        results, place, counted = self._results, 0, 0
        for committed, count in sorted(self._commits, key=itemgetter(0)):
            counted += count
            while place < len(results) and results[place][1] < counted:
                place += 1
            if place == len(results):
                return
            yield committed, max(0.0, results[place][0] - committed), count


def _reached(took: Sequence[tuple[float, int]], share: float) -> float:
    counted = 0
    for seconds, count in took:
        counted += count
        if counted >= share:
            return seconds
    return 0.0


@contextmanager
def watched(database: str, latency: Latency) -> Iterator[None]:
    """Query the result until the block ends."""
    ended = threading.Event()

    def poll() -> None:
        with psycopg.connect(database, autocommit=True) as connection:
            over = False
            while not over:
                # Query once more at the end, when the result is complete.
                over = ended.wait(EVERY)
                ((total,),) = connection.execute(IN_RESULT).fetchall()
                latency.in_result(total)

    thread = threading.Thread(target=poll, name="latency", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
