"""One handler's way through the batches of its group, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from airflow_pgchange.events.event import Event
from airflow_pgchange.events.group import Retry
from airflow_pgchange.events.handler import Delivery, Handler
from airflow_pgchange.events.handler_threads import Call, HandlerThreads


@dataclass(eq=False)
class Work:
    """What a handler has to do of one batch: ``left`` of its calls have not ended."""

    number: int
    chains: list[deque[Delivery]]
    left: int
    failed: list[Call] = field(default_factory=list)


class HandlerProgress:
    """Which batches a handler has done, which one it is at, and which wait for it.

    ``checkpoint`` is the number of the last batch that it has done: all before it are done too.
    """

    def __init__(self, group: str, handler: Handler, ended: SimpleQueue[Call | None]) -> None:
        self.handler = handler
        self.checkpoint = 0
        self.threads = HandlerThreads(handler, ended)
        self._group = group
        self._waiting: deque[Work] = deque()
        self._at: Work | None = None

    @property
    def idle(self) -> bool:
        return self._at is None and not self._waiting

    def add(self, number: int, events: Iterable[Event], retries: Iterable[Retry]) -> None:
        """Put a batch behind those that wait; what is not for this handler is left out."""
        chains = self._chains(
            [event for event in events if self.handler.wants(event)],
            [retry for retry in retries if retry.handler == self.handler.name and retry.events],
        )
        self._waiting.append(Work(number, chains, sum(map(len, chains))))

    def begin(self) -> None:
        """Make the calls of the next batch, if none is in work."""
        while self._at is None and self._waiting:
            work = self._waiting.popleft()
            if work.left == 0:
                self.checkpoint = work.number
                continue
            self._at = work
            for chain in work.chains:
                self._call(work, chain)

    def end(self, call: Call) -> Work | None:
        """Note that a call has ended; its batch, if that was the last of it."""
        work: Work = call.owner
        work.left -= 1
        if call.error is not None:
            work.failed.append(call)
        if call.rest:
            self._call(work, call.rest)
        return None if work.left else work

    def done(self, work: Work) -> None:
        """The batch is done, and what came of it is kept."""
        self.checkpoint = work.number
        self._at = None

    def _call(self, work: Work, chain: deque[Delivery]) -> None:
        self.threads.submit(Call(chain.popleft(), chain, work))

    def _chains(self, events: Sequence[Event], retries: Sequence[Retry]) -> list[deque[Delivery]]:
        """One call after another for what has the same key, the older first."""
        chains: dict[Hashable, deque[Delivery]] = {}
        for retry in retries:
            chains.setdefault(self._key(retry.events[0]), deque()).append(
                Delivery(self._group, self.handler.name, retry.events, retry.attempt)
            )
        split: dict[Hashable, list[Event]] = {}
        for event in events:
            split.setdefault(self._key(event), []).append(event)
        for value, its_events in split.items():
            chains.setdefault(value, deque()).append(
                Delivery(self._group, self.handler.name, tuple(its_events))
            )
        return list(chains.values())

    def _key(self, event: Event) -> Hashable:
        """By what the event is split off; one that has no key goes alone, and its call fails on that."""
        try:
            return self.handler.key_of(event)
        # One that calls sys.exit() has failed like any other.
        except (Exception, SystemExit):  # noqa: BLE001
            return ("no key", event.id)
