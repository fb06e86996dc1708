"""The progress of an attempt on a batch: the duration of each phase, and log lines about the current step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from airflow_pgchange.feeds.periodic_thread import repeated

EVERY = 5.0
"""Seconds between two log lines about a step. An attempt that is shorter has none."""

Phase = Literal["claim", "start", "process", "merge", "ack"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Item = TypeVar("Item")


@dataclass
class Count:
    """How many changes of a batch were read. The number is current whenever it is printed."""

    total: int
    read: int = 0

    def __str__(self) -> str:
        return f"{self.read:,} of {self.total:,} changes"


class Progress:
    """The phases of one attempt, and its current step, which is logged only inside of ``told``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[Phase, float] = {}
        self._phase: Phase | None = None
        self._since = 0.0
        self._lock = threading.Lock()
        self._say: Callable[[str], None] | None = None
        self._step = ""
        self._how_far: object = ""
        self._quiet_until = self._due = 0.0

    def begin(self, phase: Phase, since: float | None = None) -> None:
        """End the current phase, and begin or continue ``phase``: now, or at the time ``since`` of the same clock."""
        now = self._clock() if since is None else since
        self._ended = self._until(now)
        self._phase, self._since = phase, now

    @property
    def seconds(self) -> dict[str, float]:
        """The duration of each phase. The current phase counts until now."""
        took = self._until(self._clock())
        return {phase: took[phase] for phase in PHASES if phase in took}

    def at(self, step: str, how_far: object) -> None:
        """Set the step, and how far it is. ``how_far`` is turned into text when it is logged."""
        with self._lock:
            new = step != self._step
            self._step, self._how_far = step, how_far
            self._tell(new)

    def again(self) -> None:
        """Log how far the step is, if the last log line is old enough."""
        with self._lock:
            self._tell(new=False)

    @contextmanager
    def reported_to(self, say: Callable[[str], None]) -> Iterator[None]:
        """Call ``say`` with the progress while the block runs, when a step begins and every ``EVERY`` seconds while it
        lasts. It is not called in the first ``EVERY`` seconds."""
        self._quiet_until = self._due = self._clock() + EVERY
        self._say = say

        def tell() -> bool:
            self.again()
            return True

        try:
            with repeated(tell, EVERY, "pgchange-progress"):
                yield
        finally:
            self._say = None

    def counted(self, changes: Generator[Item, None, None], total: int) -> Generator[Item, None, None]:
        """Yield the changes, and count them as they are read."""
        count = Count(total)
        with closing(changes):
            self.at("reading", count)
            for change in changes:
                count.read += 1
                yield change

    def _until(self, now: float) -> dict[Phase, float]:
        if self._phase is None:
            return {}
        return {**self._ended, self._phase: self._ended.get(self._phase, 0.0) + now - self._since}

    def _tell(self, new: bool) -> None:
        now = self._clock()
        if self._say is None or not self._step or now < self._quiet_until or not (new or now >= self._due):
            return
        self._due = now + EVERY
        for line in str(self._how_far).splitlines():
            self._say(f"{self._step}: {line}")
