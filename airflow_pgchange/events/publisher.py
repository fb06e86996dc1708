"""A buffer that publishes in the background."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Self

from airflow_pgchange.errors import InvalidArgument, NotPublished, PublisherFull
from airflow_pgchange.events.event import Event, Row, row_of
from airflow_pgchange.events.sender import PASSING, RefusedEvent, Sender
from airflow_pgchange.feeds.argument_checks import EVENTS_LIMIT, Seconds, check_count, patience, seconds

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Initial and maximum delay in seconds before the publisher reconnects to an unavailable server."""
CLOSE_WITHIN = 30.0
"""Seconds that a program waits at its end until buffered events are published."""


class Publisher:
    """Publishes events in the background, in its own transactions, in the order in which each thread put them.

    A batch is sent once ``limit`` events wait, or once the oldest has waited for ``max_age``; None: without limit. If the
    server is unavailable, the batch is retried until ``close``. A connection that is lost during a commit neither loses
    nor duplicates an event. ``memory`` is the maximum of buffered bytes: ``put`` waits while the buffer is full. An event
    that PostgreSQL refuses does not delay other events. Refused events are kept for ``flush``; once they take up
    ``memory``, ``put`` raises PublisherFull until ``flush`` has reported them.

    Use it as a context manager, or call ``close``. A program, or a multiprocessing process, that ends without ``close``
    still publishes its events. ``flush`` and ``close`` raise NotPublished with the events that could not be sent. A
    killed process loses the events that were not flushed. The constructor raises InvalidArgument for sizes below 1 and
    for a ``max_age`` below 0.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        limit: int = EVENTS_LIMIT,
        max_age: Seconds | None = 0.05,
        memory: int = 64 * 2**20,
    ) -> None:
        check_count("limit", limit)
        check_count("memory", memory)
        self._limit = limit
        self._max_age = threading.TIMEOUT_MAX if max_age is None else seconds("max_age", max_age)
        self._memory = memory
        self._process = os.getpid()
        self._changed = threading.Condition()
        # Access the following attributes only while holding the condition.
        self._rows: deque[tuple[float, Row]] = deque()
        self._in_flight: list[Row] = []
        self._refused: list[RefusedEvent] = []
        self._waiting_bytes = self._refused_bytes = 0
        self._hurried = 0
        self._accepted = self._settled = 0
        self._closing = self._given_up = False
        self._last_error: Exception | None = None
        self._death: BaseException | None = None
        # Only the thread uses the sender.
        self._sender = Sender(conninfo)
        self._thread = threading.Thread(target=self._work, name="pgchange-publisher", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        # A forked multiprocessing process does not run atexit functions, but it runs finalizers.
        self._end_of_child = Finalize(None, self.close, exitpriority=0)

    def put(self, events: Event | Iterable[Event], timeout: Seconds | None = None) -> None:
        """Buffer events to be published soon.

        Raises InvalidArgument if an event is not JSON, if the publisher is closed, or in another process than that of the
        constructor. Raises PublisherFull if the buffer is still full after ``timeout``. If there are several events,
        those before the error are buffered.
        """
        for event in [events] if isinstance(events, Event) else events:
            self._put_one(row_of(event), patience("timeout", timeout))

    def flush(self, timeout: Seconds | None = None) -> None:
        """Wait until all events that were put before are committed.

        Raises NotPublished with the refused events. After ``timeout`` it also contains the events that still wait; these
        stay in the buffer. Events that ``close`` gave up are reported at once.
        """
        self._check_process()
        with self._changed:
            goal = self._hurried = self._accepted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._settled >= goal or self._over, patience("timeout", timeout))
            self._raise_what_failed([] if self._settled >= goal else self._unsent())

    def close(self, timeout: Seconds | None = CLOSE_WITHIN) -> None:
        """Publish the buffered events, and stop. Does nothing if an earlier call has given up.

        Raises NotPublished with the events that were refused or could not be sent within ``timeout``. Events whose commit
        was running may exist in the log, under the ids that they have in the error.
        """
        atexit.unregister(self.close)
        self._end_of_child.cancel()
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._given_up:
                return
            self._closing = True
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: self._settled >= self._accepted or self._over, patience("timeout", timeout)
            )
            if not done or self._death is not None:
                self._given_up = True
                self._changed.notify_all()
            unsent = self._unsent()
        if unsent:
            # The thread may wait for a server that does not answer. It is a daemon, so it does not block the program's
            # end.
            self._thread.join(0.1)
        else:
            self._thread.join()
        with self._changed:
            self._raise_what_failed(unsent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put_one(self, row: Row, timeout: float | None) -> None:
        self._check_process()
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._too_many_refused or self._has_room(row), timeout
            )
            if self._closing:
                state = "is closed" if self._death is None else "has failed, and flush raises the error"
                raise InvalidArgument(f"this publisher {state}: open another")
            if self._too_many_refused:
                raise PublisherFull(
                    f"{len(self._refused)} events that were refused take {self._refused_bytes} bytes, and memory is "
                    f"{self._memory}: call flush, whose error has them"
                )
            if not self._has_room(row):
                reason = f", as the server is away ({self._last_error})" if self._last_error else ""
                raise PublisherFull(
                    f"{self._waiting_bytes} bytes of events wait to be published{reason}: put fewer, wait, "
                    f"or give more memory than {self._memory} bytes"
                )
            self._rows.append((time.monotonic(), row))
            self._waiting_bytes += row.size
            self._accepted += 1
            if len(self._rows) in (1, self._limit):
                self._changed.notify_all()

    def _has_room(self, row: Row) -> bool:
        """Return whether the event fits into the buffer. An event larger than ``memory`` fits if the buffer is empty."""
        return self._waiting_bytes == 0 or self._waiting_bytes + row.size <= self._memory

    @property
    def _over(self) -> bool:
        """Whether no more events will be published."""
        return self._given_up or self._death is not None

    @property
    def _too_many_refused(self) -> bool:
        return self._refused_bytes >= self._memory

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidArgument("this publisher was made in another process: make one after the fork")

    def _unsent(self) -> list[Row]:
        return [*self._in_flight, *(row for _, row in self._rows)]

    def _raise_what_failed(self, unsent: list[Row]) -> None:
        refused, self._refused, self._refused_bytes = self._refused, [], 0
        events = [each.row.event for each in refused] + [row.event for row in unsent]
        if not events and self._death is None:
            return
        reasons = [str(refused[0].error)] if refused else []
        if self._death is not None:
            reasons.append(f"the publisher itself failed ({self._death!r}): open another")
        elif unsent:
            reasons.append(f"the server did not take them ({self._last_error or 'it does not answer'})")
        raise NotPublished(
            f"events that were not published: {len(events)} ({len(refused)} refused, {len(unsent)} unsent); "
            f"{'; '.join(reasons)}. The error has them in its list events: mend them, or publish them again",
            events,
        ) from self._death

    def _work(self) -> None:
        try:
            self._publish()
        # Catch everything, because flush and close wait for this thread and must report its error.
        except BaseException as error:
            log.exception("a publisher failed: flush and close will raise its error")
            with self._changed:
                self._death = error
                self._closing = True
                self._changed.notify_all()

    def _publish(self) -> None:
        while (batch := self._take()) is not None:
            refused = self._send(batch)
            if refused:
                log.error(
                    "%d events were refused, and flush or close will raise NotPublished: %s",
                    len(refused),
                    refused[0].error,
                )
            with self._changed:
                if refused is None:
                    break
                self._in_flight = []
                self._refused += refused
                self._refused_bytes += sum(each.row.size for each in refused)
                self._settled += len(batch)
                self._waiting_bytes -= sum(row.size for row in batch)
                self._changed.notify_all()
        self._sender.close()

    def _take(self) -> list[Row] | None:
        """Wait until the next batch is due, and return it; None if the publisher is closed and the buffer is empty."""
        with self._changed:
            while not self._given_up:
                due = self._due()
                if due is not None and due <= 0:
                    count = min(len(self._rows), self._limit)
                    self._in_flight = [self._rows.popleft()[1] for _ in range(count)]
                    return self._in_flight
                if self._closing:
                    return None
                self._changed.wait(due)
            return None

    def _due(self) -> float | None:
        """Return the seconds until the next batch is due; None if the buffer is empty."""
        if not self._rows:
            return None
        if self._closing or self._hurried > self._settled or len(self._rows) >= self._limit:
            return 0
        return self._rows[0][0] + self._max_age - time.monotonic()

    def _send(self, rows: list[Row]) -> list[RefusedEvent] | None:
        """Commit a batch, and retry while the server is unavailable.

        Returns the refused events, or None if the publisher gave up.
        """
        pause, self._sender.in_doubt = FIRST_PAUSE, False
        while True:
            try:
                rows = self._sender.with_ids(rows)
                with self._changed:
                    self._in_flight = rows
                return self._sender.commit(rows)
            except PASSING as error:
                log.warning("could not publish %d events, will retry: %s", len(rows), error)
                self._sender.close()
                with self._changed:
                    self._last_error = error
                    if self._changed.wait_for(lambda: self._given_up, pause):
                        return None
                pause = min(2 * pause, LONGEST_PAUSE)
            # Catch everything: without this thread no event would be published, and flush would wait forever.
            except Exception as error:  # noqa: BLE001
                return [RefusedEvent(row, error) for row in rows]
