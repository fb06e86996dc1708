"""The threads that call one handler. A call that exceeds its timeout is abandoned with its thread."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Generator
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from airflow_pgchange.errors import HandlerFailed
from airflow_pgchange.events.event import Event
from airflow_pgchange.events.handler import Delivery, Handler
from airflow_pgchange.feeds.argument_checks import seconds

log = logging.getLogger(__name__)

MOST_STUCK = 10
"""Maximum number of abandoned calls of one handler that still run. If there are more, the run fails."""


@dataclass(eq=False)
class Call:
    """A call of a handler with one delivery. ``rest``: the deliveries after it. ``owner``: the caller's own data."""

    delivery: Delivery
    rest: deque[Delivery]
    owner: Any
    error: BaseException | None = None
    deadline: float = 0.0
    thread: threading.Thread | None = None
    abandoned: bool = False


class HandlerThreads:
    """A handler's threads. Each finished call is put into ``ended``, unless it was abandoned."""

    def __init__(self, handler: Handler, ended: SimpleQueue[Call | None]) -> None:
        self._handler = handler
        self._timeout = seconds("timeout", handler.timeout)
        self._ended = ended
        self._changed = threading.Condition()
        # Access the following attributes only while holding the condition.
        self._waiting: deque[Call] = deque()
        self._running: set[Call] = set()
        self._stuck: list[threading.Thread] = []
        self._closed = False
        for _ in range(handler.threads if handler.key else 1):
            self._start()

    def submit(self, call: Call) -> None:
        with self._changed:
            if not self._closed:
                self._waiting.append(call)
                self._changed.notify()

    def overdue(self) -> list[Call]:
        """Abandon the calls that exceed their timeout, and return them. A new thread replaces the thread of each."""
        now = time.monotonic()
        with self._changed:
            late = [call for call in self._running if call.deadline <= now]
            self._running.difference_update(late)
            for call in late:
                call.abandoned = True
                call.error = TimeoutError(f"the call took longer than {self._timeout:g} s")
                call.delivery.cancelled.set()
                self._stuck += [call.thread] if call.thread else []
                self._start()
        return late

    def refuse_stuck(self) -> None:
        """Raise HandlerFailed if more than ``MOST_STUCK`` abandoned calls still run."""
        with self._changed:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            if len(self._stuck) > MOST_STUCK:
                raise HandlerFailed(
                    f"handler {self._handler.name}: {len(self._stuck)} calls still run after their timeout of "
                    f"{self._timeout:g} s: set timeouts in the handler for everything it waits for; nothing is lost"
                )

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which the next call exceeds its timeout; None if no call runs."""
        with self._changed:
            return min((call.deadline for call in self._running), default=None)

    def cancel(self) -> None:
        """Set ``cancelled`` of the running calls: their results are no longer used."""
        with self._changed:
            for call in self._running:
                call.delivery.cancelled.set()

    def close(self) -> None:
        """Drop the calls that have not begun. The threads end when their calls end."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        threading.Thread(target=self._work, name=f"pgchange-{self._handler.name}", daemon=True).start()

    def _work(self) -> None:
        while (call := self._take()) is not None:
            error = _error_of(self._handler, call.delivery)
            with self._changed:
                if call.abandoned:
                    return
                self._running.remove(call)
                call.error = error
                self._ended.put(call)

    def _take(self) -> Call | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            call = self._waiting.popleft()
            call.thread = threading.current_thread()
            call.deadline = time.monotonic() + self._timeout
            self._running.add(call)
            return call


def _error_of(handler: Handler, delivery: Delivery) -> BaseException | None:
    """Call the handler. Return its error, or None."""
    try:
        handler.key_of(delivery.events[0])
        result = handler.run(replace(delivery, events=_copies(delivery.events)))
        if inspect.iscoroutine(result):
            asyncio.run(asyncio.wait_for(result, seconds("timeout", handler.timeout)))
        elif isinstance(result, Awaitable | Generator | AsyncGenerator):
            raise TypeError(
                f"it returned a {type(result).__name__} that nobody runs: write it without yield, or async"
            )
    # A handler that calls sys.exit() has failed like any other.
    except BaseException as error:  # noqa: BLE001
        return error
    return None


def _copies(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Copy the events: if a handler changes a payload, other handlers, retries and dead letters are not affected."""
    try:
        # copy.deepcopy() takes two to four times as long.
        return tuple(pickle.loads(pickle.dumps(events, pickle.HIGHEST_PROTOCOL)))
    except RecursionError:
        return events
