"""The progress of one handler through the batches of its group, in order."""

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
    """A handler's calls for one batch. The calls of a chain run in sequence. ``left``: calls that have not ended."""

    number: int
    chains: list[deque[Delivery]]
    left: int
    failed: list[Call] = field(default_factory=list)


class HandlerProgress:
    """The batches that a handler has done, the current batch, and the waiting batches.

    ``checkpoint`` is the number of the last finished batch. All batches before it are finished too.
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
        """Append a batch to the waiting batches, with only the events and retries for this handler."""
        chains = self._chains(
            [event for event in events if self.handler.wants(event)],
            [retry for retry in retries if retry.handler == self.handler.name and retry.events],
        )
        self._waiting.append(Work(number, chains, sum(map(len, chains))))

    def begin(self) -> None:
        """Submit the calls of the next batch, unless a batch is in progress."""
        while self._at is None and self._waiting:
            work = self._waiting.popleft()
            if work.left == 0:
                self.checkpoint = work.number
                continue
            self._at = work
            for chain in work.chains:
                self._call(work, chain)

    def end(self, call: Call) -> Work | None:
        """Record the end of a call. Return its batch if that was the batch's last call, else None."""
        work: Work = call.owner
        work.left -= 1
        if call.error is not None:
            work.failed.append(call)
        if call.rest:
            self._call(work, call.rest)
        return None if work.left else work

    def done(self, work: Work) -> None:
        """Mark a batch as done, after its failures are stored."""
        self.checkpoint = work.number
        self._at = None

    def _call(self, work: Work, chain: deque[Delivery]) -> None:
        self.threads.submit(Call(chain.popleft(), chain, work))

    def _chains(self, events: Sequence[Event], retries: Sequence[Retry]) -> list[deque[Delivery]]:
        """Return a chain of calls for each key, with retries before new events."""
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
        """Return the event's key. If ``key`` raises, the event gets its own call, which then fails with that error."""
        try:
            return self.handler.key_of(event)
        # A key function that calls sys.exit() has failed like any other.
        except (Exception, SystemExit):  # noqa: BLE001
            return ("no key", event.id)
