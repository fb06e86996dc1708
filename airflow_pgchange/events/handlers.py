"""Running the handlers of a group."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Literal

from airflow_pgchange.events.group import Failure, Group, Read, Retry, held
from airflow_pgchange.events.handler import Handler, together
from airflow_pgchange.events.handler_progress import Course, Work
from airflow_pgchange.events.handler_threads import Call
from airflow_pgchange.feeds.checks import check_count, check_group_name
from airflow_pgchange.feeds.errors import HandlerFailed, InvalidArgument, Stopped
from airflow_pgchange.feeds.failures import LONGEST, described
from airflow_pgchange.stopping import Stop

log = logging.getLogger(__name__)

STAY_EVERY = 5.0
"""Seconds between two signs of life while nothing may be read."""


@dataclass(frozen=True)
class Handled:
    """What a run did: batches and events that it read, calls that failed, and what became of those: retries that it
    scheduled, dead letters that it wrote."""

    batches: int = 0
    events: int = 0
    failed: int = 0
    retried: int = 0
    given_up: int = 0


class EventHandlers:
    """Runs the named handlers of one group, each at its own pace.

    It holds the group by the lock that ``read_next_events`` and ``EventFeed`` take, so nobody else reads it meanwhile. A
    fast handler is ahead of the slowest by at most ``read_ahead`` batches of at most ``chunk_size`` events, and the
    stored cursor is where the slowest reliable one is. Every handler gets the events in the order of dispatch, those of
    another key excepted. While somebody else holds the group, ``run`` waits up to ``wait`` seconds, None: as long as it
    takes.

    Guarantee: a reliable handler gets each event at least once; one that was not finished when a run ended, or whose
    cursor could not be stored, comes again, to all handlers of the group. Others get it at most once where no handler of
    the group is reliable.
    Needs a session of its own: no pooler in transaction mode. Up to ``read_ahead`` batches and one of ``chunk_size``
    events are in memory. Raises InvalidArgument for invalid arguments.
    """

    def __init__(
        self,
        group: str,
        handlers: Sequence[Handler],
        conninfo: str,
        *,
        chunk_size: int = 1000,
        read_ahead: int = 10,
        poll_every: float = 0.1,
        wait: float | None = 0,
    ) -> None:
        check_group_name(group)
        names = [handler.name for handler in handlers]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument(
                f"group {group}: give at least one handler, each a name of its own: {names}"
            )
        check_count("chunk_size", chunk_size)
        check_count("read_ahead", read_ahead)
        self.group = group
        self.handlers = tuple(handlers)
        self._conninfo = conninfo
        self._chunk_size = chunk_size
        self._read_ahead = read_ahead
        self._poll_every = poll_every
        self._wait = wait
        self._stop = Stop()
        self._ended: SimpleQueue[Call | None] = SimpleQueue()

    def run(self, until: Literal["empty"] | float | None = None) -> Handled:
        """Handle events until none is ready, for so many seconds, or until ``stop``.

        What was read is finished; ``stop`` finishes only the calls that run. Raises UnknownConsumer where there is no
        such group, ConsumerBusy where somebody else holds it, DispatchEnded, ConnectionLost, and HandlerFailed; in every
        case nothing runs on but calls past their timeout, and what was not finished comes again.
        """
        try:
            with held(self._conninfo, self.group, self._wait, self._stop) as group:
                # Each run has its own: a call that outlives a run that was interrupted is nothing to the next.
                self._ended = SimpleQueue()
                return _Run(self, group, self._ended).work(until)
        except Stopped:
            return Handled()

    def stop(self) -> None:
        """End ``run`` soon and for good, from another thread or from a signal's handler."""
        self._stop.ask()
        self._ended.put(None)


class _Run:
    """One run, on the thread that reads and writes; calls are made on threads of the lanes."""

    def __init__(self, handlers: EventHandlers, group: Group, ended: SimpleQueue[Call | None]) -> None:
        self._of = handlers
        self._group = group
        self._ended = ended
        self._courses = {each.name: Course(group.name, each, ended) for each in handlers.handlers}
        self._reliable = [course for course in self._courses.values() if course.handler.reliable]
        self._cursors: deque[tuple[int, str, list[Failure]]] = deque()
        self._cursor: str | None = None
        self._numbers = 0
        self._done = Handled()
        self._fatal: Call | None = None

    def work(self, until: Literal["empty"] | float | None) -> Handled:
        try:
            self._work(until)
        except BaseException:
            for course in self._courses.values():
                course.lanes.cancel()
            raise
        finally:
            over = self._finish_what_runs()
        self._settle(over)
        if self._fatal is not None:
            failed = self._fatal.delivery
            raise HandlerFailed(
                f"group {self._group.name}: handler {failed.handler} failed on {len(failed.events)} events from "
                f"{failed.events[0].id}, and it has no retries, so nothing passes them: mend it and run again"
            ) from self._fatal.error
        return self._done

    def _work(self, until: Literal["empty"] | float | None) -> None:
        now = read_at = stay_at = time.monotonic()
        ends = now + until if isinstance(until, float | int) else math.inf
        while not self._stopping:
            now = time.monotonic()
            if now >= stay_at:
                self._group.stay()
                stay_at = now + STAY_EVERY
            idle = all(course.idle for course in self._courses.values())
            if now >= ends and idle:
                return
            may_read = now < ends and self._ahead() < self._of._read_ahead
            if may_read and now >= read_at:
                batch = self._group.read(self._cursor, self._of._chunk_size)
                if batch is not None:
                    self._hand_out(batch)
                elif not self._group.more:
                    if idle and until == "empty":
                        return
                    read_at = now + self._of._poll_every
            wake_at = min(stay_at, read_at if may_read else math.inf, ends if now < ends else math.inf)
            self._settle(self._collect(wake_at))
            for course in self._courses.values():
                course.lanes.refuse_stuck()

    @property
    def _stopping(self) -> bool:
        return self._of._stop() or self._fatal is not None

    def _ahead(self) -> int:
        """How many batches the fastest handler may be ahead of the slowest."""
        return self._numbers - min(course.checkpoint for course in self._courses.values())

    def _hand_out(self, batch: Read) -> None:
        self._numbers += 1
        self._cursor = batch.cursor
        # Given up where the batch is passed: before, every run that does not come so far would give it up once more.
        lost = [failure for retry in batch.retries if (failure := self._lost(retry))]
        self._cursors.append((self._numbers, batch.cursor, lost))
        self._done = replace(
            self._done, batches=self._done.batches + 1, events=self._done.events + batch.count
        )
        for course in self._courses.values():
            course.add(self._numbers, batch.events, batch.retries)
        self._advance([])

    def _lost(self, retry: Retry) -> Failure | None:
        """A dead letter for what comes back to nobody."""
        by = retry.event.subscriptions
        if retry.problem is not None:
            return Failure(retry.handler, by, retry.attempt, (retry.event,), retry.problem, None)
        if retry.handler not in self._courses:
            return Failure(
                retry.handler, by, retry.attempt, retry.events, "its group has no handler of this name", None
            )
        return None

    def _collect(self, until: float) -> list[Call]:
        """The calls that have ended or are overdue; waits for the first of them, at most until a time."""
        lanes = [course.lanes for course in self._courses.values()]
        deadlines = [deadline for lane in lanes if (deadline := lane.next_deadline()) is not None]
        over: list[Call] = []
        wait = min([until, *deadlines]) - time.monotonic()
        with suppress(Empty):
            over += filter(None, [self._ended.get(timeout=max(wait, 0))])
            while True:
                over += filter(None, [self._ended.get_nowait()])
        for lane in lanes:
            over += lane.overdue()
        return over

    def _finish_what_runs(self) -> list[Call]:
        """Begin no call any more, and wait for those that run."""
        over: list[Call] = []
        for course in self._courses.values():
            course.lanes.close()
        while any(course.lanes.next_deadline() is not None for course in self._courses.values()):
            over += self._collect(time.monotonic() + STAY_EVERY)
        return over + self._collect(0)

    def _settle(self, over: list[Call]) -> None:
        """Take note of calls that are over, and keep what came of the batches that are done with them."""
        finished: list[tuple[Course, Work]] = []
        for call in over:
            course = self._courses[call.delivery.handler]
            if call.error is not None:
                self._tell(course.handler, call)
                if course.handler.reliable and course.handler.retries is None:
                    self._fatal = self._fatal or call
                    continue
            work = course.end(call)
            if work is not None:
                finished.append((course, work))
        self._advance(finished)

    def _advance(self, finished: list[tuple[Course, Work]]) -> None:
        """Write the failures of finished batches together with the cursor behind those that are done, then go on with the
        next; of those some have nothing for a handler, and are done at once."""
        failures = [
            failure
            for course, work in finished
            if course.handler.reliable
            for call in work.failed
            if call.error is not None
            for failure in self._failures(course.handler, call, call.error)
        ]
        for course, work in finished:
            course.done(work)
        # Before the next calls: who is not reliable is not to get again what it is called with now.
        self._keep(failures)
        for course in self._courses.values():
            if not self._stopping:
                course.begin()
        self._keep([])

    def _keep(self, failures: list[Failure]) -> None:
        """Write failures together with the cursor behind the batches that every reliable handler has done, if it has
        moved on."""
        lowest = min((course.checkpoint for course in self._reliable), default=self._numbers)
        cursor = None
        while self._cursors and self._cursors[0][0] <= lowest:
            _, cursor, lost = self._cursors.popleft()
            failures = failures + lost
        retried = self._group.keep(failures, cursor) if failures or cursor is not None else 0
        self._done = replace(
            self._done,
            retried=self._done.retried + retried,
            given_up=self._done.given_up + len(failures) - retried,
        )

    def _failures(self, handler: Handler, call: Call, error: BaseException) -> list[Failure]:
        """One for all events that have a subscription in common, by which they come again in their order: if it is ended,
        the others still come."""
        delivery = call.delivery
        reached = [handler.reached_by(event) for event in delivery.events]
        if len(set(reached)) > 1:
            there = self._group.there(set().union(*reached))
            reached = [tuple(one for one in by if one in there) or by for by in reached]
        return [
            Failure(
                handler.name,
                subscriptions,
                delivery.attempt,
                tuple(events),
                described(error, [self._of._conninfo])[:LONGEST],
                handler.pause_after(delivery.attempt),
            )
            for subscriptions, events in together(delivery.events, reached)
        ]

    def _tell(self, handler: Handler, call: Call) -> None:
        self._done = replace(self._done, failed=self._done.failed + 1)
        log.warning(
            "group %s: handler %s failed in attempt %d on %d events from %s",
            self._group.name,
            handler.name,
            call.delivery.attempt,
            len(call.delivery.events),
            call.delivery.events[0].id,
            exc_info=call.error,
        )
