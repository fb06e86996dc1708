"""What a handler is, and what it is called with."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events.event import Event
from airflow_pgchange.feeds.checks import MOMENT, Seconds, check_count, is_sendable, seconds

RETRY = "pgmb-retry"
"""The topic of events that bring others back to one handler."""
LONGEST_PAUSE = timedelta(days=3650)
"""To a retry: its time must be one that an id can say."""


@dataclass(frozen=True)
class Delivery:
    """What a handler is called with: events of its group in the order of dispatch, at least one.

    ``attempt`` counts from 1. ``cancelled`` is set when the call has run past its timeout, or the group was lost:
    nobody waits for it any more.
    """

    group: str
    handler: str
    events: tuple[Event, ...]
    attempt: int = 1
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    @property
    def key(self) -> str:
        """The same for the same handler and events in every attempt, so that results elsewhere can be kept once.

        A batch that was not finished when its group was left may be cut otherwise when it comes again: then the
        events' own ids are what stays.
        """
        named = "\n".join([self.group, self.handler, *(str(event.id) for event in self.events)])
        return hashlib.sha256(named.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Handler:
    """A callable by the name under which its retries and dead letters go; ``run(delivery)``, ``def`` or ``async def``.

    Reliable, each event comes at least once: a call that raises, or lasts longer than ``timeout``, is tried
    again after each of ``retries``, as an event of its own behind what follows meanwhile; after the last
    try the events and the error become a dead letter. With ``retries=None`` a failed call ends the run instead, nothing
    passes it, and the next run begins with its batch. Not reliable, a failure is logged, and nothing waits for it: each
    event comes at most once, but where its group has reliable ones too what those had not finished when a run ended
    early comes again. A ``def`` that runs past its timeout cannot be ended, only left to itself: give what it waits for
    a timeout too, or look at ``delivery.cancelled``. Each call of an ``async def`` has an event loop of its own: what is
    bound to one, such as a client or an ``asyncio.Lock``, is made within the call.

    ``key`` splits a batch: events for which ``key(event)`` is the same come in one call, in order, others in parallel
    on ``threads`` threads; of an event for which ``key`` fails the call fails. ``subscriptions`` are the ids of those
    whose events it gets; None: all of its group. Raises InvalidArgument for arguments that no handler can have.
    """

    name: str
    run: Callable[[Delivery], Any]
    reliable: bool = True
    timeout: Seconds = 60.0
    retries: Sequence[Seconds] | None = (60.0, 300.0)
    key: Callable[[Event], Hashable] | None = None
    threads: int = 4
    subscriptions: Collection[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not is_sendable(self.name) or "/" in self.name:
            raise InvalidArgument(
                "the name of a handler, by which its retries find it, is some characters without a slash, "
                f"not {self.name!r:.300}: name it otherwise"
            )
        if not callable(self.run):
            raise InvalidArgument(f"handler {self.name}: run must be callable, not {self.run!r}")
        if inspect.isgeneratorfunction(self.run) or inspect.isasyncgenfunction(self.run):
            raise InvalidArgument(f"handler {self.name}: nobody runs a generator: write run without yield")
        seconds(f"handler {self.name}: timeout", self.timeout, least=MOMENT)
        for pause in self.retries or ():
            seconds(f"handler {self.name}: each of retries", pause, most=LONGEST_PAUSE)
        # A text is a collection too, of letters: nothing would ever come by one of those.
        if isinstance(self.subscriptions, str):
            raise InvalidArgument(
                f"handler {self.name}: subscriptions are a list of ids, not {self.subscriptions!r:.100}"
            )
        check_count(f"handler {self.name}: threads", self.threads)

    def wants(self, event: Event) -> bool:
        """Whether the event comes from one of its subscriptions."""
        return self.subscriptions is None or not set(event.subscriptions).isdisjoint(self.subscriptions)

    def key_of(self, event: Event) -> Hashable:
        """Raises whatever ``key`` raises, and TypeError for what cannot be compared."""
        value = self.key(event) if self.key is not None else None
        hash(value)
        return value

    def reached_by(self, event: Event) -> tuple[str, ...]:
        """The subscriptions by which an event comes to it: its own, where some of them are."""
        own = [one for one in event.subscriptions if self.subscriptions is None or one in self.subscriptions]
        return tuple(own) or event.subscriptions

    def pause_after(self, attempt: int) -> float | None:
        """Seconds from a failed attempt to the next; None after the last."""
        pauses = self.retries or ()
        return seconds("retries", pauses[attempt - 1]) if attempt <= len(pauses) else None


def together(
    events: Sequence[Event], reached: Sequence[tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[Event]]]:
    """Events in as few parts as it takes for all of a part to be reached by a subscription in common, with those."""
    parts: list[tuple[tuple[str, ...], list[Event]]] = []
    for event, by in zip(events, reached, strict=True):
        for number, (common, part) in enumerate(parts):
            left = tuple(one for one in common if one in by)
            if left:
                parts[number] = (left, part)
                part.append(event)
                break
        else:
            parts.append((by, [event]))
    return parts
