"""A handler of events, and the delivery that is its argument."""

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
from airflow_pgchange.feeds.argument_checks import MOMENT, Seconds, check_count, is_sendable, seconds

RETRY = "pgmb-retry"
"""The topic of events that schedule a retry for one handler."""
LONGEST_PAUSE = timedelta(days=3650)
"""Maximum pause before a retry. The time of the retry must fit into an event id, which ends in the year 2112."""


@dataclass(frozen=True)
class Delivery:
    """The argument of a handler: at least one event of its group, in the order of dispatch.

    ``attempt`` counts from 1. ``cancelled`` is set after the call's timeout, or if the group's lock was lost: the result
    of the call is no longer used.
    """

    group: str
    handler: str
    events: tuple[Event, ...]
    attempt: int = 1
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    @property
    def key(self) -> str:
        """An idempotency key: the same in every attempt for the same handler and events.

        If a run ended before it finished a batch, the batch may be split differently later. Then only the ids of the
        events stay the same.
        """
        identity = "\n".join([self.group, self.handler, *(str(event.id) for event in self.events)])
        return hashlib.sha256(identity.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Handler:
    """A callable ``run(delivery)``, ``def`` or ``async def``, with the name of its retries and dead letters.

    A reliable handler gets each event at least once. A call fails if it raises or lasts longer than ``timeout``. It is
    retried after each pause in ``retries``; other events do not wait for the retry. After the last attempt the events and
    the error become a dead letter. With ``retries=None`` a failed call ends the run instead, and the next run begins with
    its batch.

    If the handler is not reliable, a failure is only logged, and each event comes at most once. If the group has
    reliable handlers too, a run that ended early repeats the batches that they had not finished, for all handlers.

    A ``def`` cannot be stopped at its timeout; its thread is abandoned. Give its own calls a timeout too, or check
    ``delivery.cancelled``. Each call of an ``async def`` has its own event loop. Create objects that are bound to a loop,
    such as clients or an ``asyncio.Lock``, inside the call.

    ``key`` splits a batch: events with the same ``key(event)`` come in one call, in order. Calls of different keys run in
    parallel on ``threads`` threads. If ``key`` raises for an event, the call for this event fails. ``subscriptions``: the
    ids of the subscriptions whose events the handler gets; None: all of its group. Raises InvalidArgument for invalid
    arguments.
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
            raise InvalidArgument(f"handler {self.name}: run must not be a generator: write it without yield")
        seconds(f"handler {self.name}: timeout", self.timeout, least=MOMENT)
        for pause in self.retries or ():
            seconds(f"handler {self.name}: each of retries", pause, most=LONGEST_PAUSE)
        # A str is a collection of characters, none of which is a subscription id: the handler would never get an event.
        if isinstance(self.subscriptions, str):
            raise InvalidArgument(
                f"handler {self.name}: subscriptions are a list of ids, not {self.subscriptions!r:.100}"
            )
        check_count(f"handler {self.name}: threads", self.threads)

    def wants(self, event: Event) -> bool:
        """Return whether the event comes from one of the handler's subscriptions."""
        return self.subscriptions is None or not set(event.subscriptions).isdisjoint(self.subscriptions)

    def key_of(self, event: Event) -> Hashable:
        """Return the key of an event. Raises the errors of ``key``, and TypeError if the key is not hashable."""
        value = self.key(event) if self.key is not None else None
        hash(value)
        return value

    def reached_by(self, event: Event) -> tuple[str, ...]:
        """Return the event's subscriptions that the handler has; all of the event's subscriptions if it has none."""
        own = [id for id in event.subscriptions if self.subscriptions is None or id in self.subscriptions]
        return tuple(own) or event.subscriptions

    def pause_after(self, attempt: int) -> float | None:
        """Return the seconds from a failed attempt to the next; None after the last attempt."""
        pauses = self.retries or ()
        return seconds("retries", pauses[attempt - 1]) if attempt <= len(pauses) else None


def together(
    events: Sequence[Event], reached: Sequence[tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[Event]]]:
    """Group events so that all events of a part share a subscription. Return each part with its shared subscriptions.

    ``reached`` are the subscriptions of each event.
    """
    parts: list[tuple[tuple[str, ...], list[Event]]] = []
    for event, by in zip(events, reached, strict=True):
        for number, (common, part) in enumerate(parts):
            left = tuple(id for id in common if id in by)
            if left:
                parts[number] = (left, part)
                part.append(event)
                break
        else:
            parts.append((by, [event]))
    return parts
