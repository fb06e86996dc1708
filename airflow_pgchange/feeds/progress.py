"""What an attempt on a batch is at: how long each phase of it takes, and a line now and then for people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

EVERY = 5.0
"""Seconds: what is over sooner needs no word, and what lasts needs one so often."""

Phase = Literal["claim", "start", "process", "merge", "ack"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Item = TypeVar("Item")


@dataclass
class Count:
    """How many changes of so many were read, by the time that it is printed."""

    total: int
    read: int = 0

    def __str__(self) -> str:
        return f"{self.read:,} of {self.total:,} changes"


class Progress:
    """The phases of one attempt, and the step that it is at, which is said only inside of ``told``."""

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
        """End the phase before, and begin one, or go on with it: now, or at another time of the same clock."""
        now = self._clock() if since is None else since
        self._ended = self._until(now)
        self._phase, self._since = phase, now

    @property
    def seconds(self) -> dict[str, float]:
        """How long each phase took, and the one that lasts until now."""
        took = self._until(self._clock())
        return {phase: took[phase] for phase in PHASES if phase in took}

    def at(self, step: str, how_far: object) -> None:
        """Note the step, and how far it is, which is printed when it is said."""
        with self._lock:
            new = step != self._step
            self._step, self._how_far = step, how_far
            self._tell(new)

    def again(self) -> None:
        """Say how far the step is, if it was last said long enough ago."""
        with self._lock:
            self._tell(new=False)

    @contextmanager
    def told(self, say: Callable[[str], None]) -> Iterator[None]:
        """While the block runs, ``say`` what it is at: nothing for ``EVERY`` seconds, then each step as it begins, and
        one that lasts every ``EVERY`` seconds."""
        self._quiet_until = self._due = self._clock() + EVERY
        self._say = say
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(EVERY):
                self.again()

        thread = threading.Thread(target=tell, name="pgchange-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._say = None

    def counted(self, changes: Generator[Item, None, None], total: int) -> Generator[Item, None, None]:
        """The same changes, which are counted as they are read."""
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
