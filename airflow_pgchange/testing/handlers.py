"""Run the handlers of a group with one batch of events that a test gives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from airflow_pgchange.events.event import Event
from airflow_pgchange.events.group import Failure, Group, Read, Retry
from airflow_pgchange.events.handler import Handler
from airflow_pgchange.events.handler_run import HandlerRun
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.operators.handlers import EventHandlersOperator


@dataclass(frozen=True)
class HandlerFailure:
    """A failed call of a reliable handler. Its events would be retried after ``retry_in`` seconds; if that is None, they
    would become a dead letter."""

    handler: str
    events: tuple[Event, ...]
    attempt: int
    error: str
    retry_in: float | None


class FakeGroup(Group):
    """A group that has only the events of a test. It keeps the failures that a group of the event log would store."""

    def __init__(self, name: str, events: Sequence[Event], handlers: Sequence[Handler], attempt: int) -> None:
        self.name = name
        self.more = False
        self.failures: list[Failure] = []
        self._events = list(events)
        self._handlers = handlers
        self._attempt = attempt

    def read(self, cursor: str | None, limit: int) -> Read | None:
        events, self._events = tuple(self._events[:limit]), self._events[limit:]
        if not events:
            return None
        if self._attempt == 1:
            return Read(events, (), str(events[-1].id))
        retries = [
            Retry(events[0], each.name, self._attempt, tuple(filter(each.wants, events)))
            for each in self._handlers
        ]
        return Read((), tuple(retry for retry in retries if retry.events), str(events[-1].id))

    def keep(self, failures: Sequence[Failure], cursor: str | None) -> int:
        self.failures += failures
        return sum(failure.pause is not None for failure in failures)

    def present(self, subscriptions: Collection[str]) -> set[str]:
        return set(subscriptions)

    def stay(self) -> None:
        """Do nothing: no other process can take this group."""


def handled(
    operator: EventHandlersOperator,
    context: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    attempt: int,
) -> tuple[HandlerFailure, ...]:
    """Pass the events to all handlers of the operator, on threads like a run, and return the calls that failed.

    Raises HandlerFailed if a handler with ``retries=None`` fails.
    """
    handlers = operator.bound(context)  # type: ignore[arg-type]
    events = [
        Event(
            row["topic"],
            row["payload"],
            row["metadata"],
            id=row["id"],
            subscriptions=tuple(row["subscription_ids"]),
        )
        for row in rows
    ]
    group = FakeGroup(operator.group, events, handlers, attempt)
    HandlerRun(
        group,
        handlers,
        SimpleQueue(),
        Stop(),
        conninfo="",
        limit=operator.limit,
        read_ahead=operator.read_ahead,
        poll_interval=0.01,
    ).work("empty", None)
    return tuple(
        HandlerFailure(each.handler, each.events, each.attempt, each.error, each.pause)
        for each in group.failures
    )
