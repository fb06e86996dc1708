"""A run of a group's handlers: read batches, call the handlers, and store failures and the cursor."""

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

from airflow_pgchange.errors import HandlerFailed
from airflow_pgchange.events.group import Failure, Group, Read, Retry
from airflow_pgchange.events.handler import Handler, together
from airflow_pgchange.events.handler_progress import HandlerProgress, Work
from airflow_pgchange.events.handler_threads import Call
from airflow_pgchange.feeds.error_text import LONGEST, described
from airflow_pgchange.feeds.stopping import Stop

log = logging.getLogger(__name__)

STAY_EVERY = 5.0
"""Seconds between two heartbeats of the group's subscriptions."""


@dataclass(frozen=True)
class Handled:
    """The counts of a run: batches and events read, calls failed, retries scheduled, dead letters written."""

    batches: int = 0
    events: int = 0
    failed: int = 0
    retried: int = 0
    given_up: int = 0


class HandlerRun:
    """One run. This thread reads and writes the database; handlers are called on other threads.

    ``ended`` is the queue of finished calls. A None in it wakes the run so that it checks ``stop``. Passwords of
    ``conninfo`` are removed from stored errors.
    """

    def __init__(
        self,
        group: Group,
        handlers: Sequence[Handler],
        ended: SimpleQueue[Call | None],
        stop: Stop,
        *,
        conninfo: str,
        limit: int,
        read_ahead: int,
        poll_interval: float,
    ) -> None:
        self._group = group
        self._progress = {each.name: HandlerProgress(group.name, each, ended) for each in handlers}
        self._ended = ended
        self._stop = stop
        self._conninfo = conninfo
        self._limit = limit
        self._read_ahead = read_ahead
        self._poll_interval = poll_interval
        self._reliable = [progress for progress in self._progress.values() if progress.handler.reliable]
        self._cursors: deque[tuple[int, str, list[Failure]]] = deque()
        self._cursor: str | None = None
        self._numbers = 0
        self._done = Handled()
        self._fatal: Call | None = None

    def work(self, until: Literal["empty"] | float | None, idle_timeout: float | None) -> Handled:
        """Run until ``until``; None: until the stop. Raises the errors of ``EventHandlers.run``."""
        if idle_timeout is None:
            idle_timeout = 0.0 if until == "empty" else math.inf
        try:
            self._work(until, idle_timeout)
        except BaseException:
            for progress in self._progress.values():
                progress.threads.cancel()
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

    def _work(self, until: Literal["empty"] | float | None, idle_timeout: float) -> None:
        now = read_at = stay_at = busy_at = time.monotonic()
        ends = now + until if isinstance(until, float | int) else math.inf
        while not self._stopping:
            now = time.monotonic()
            if now >= stay_at:
                self._group.stay()
                stay_at = now + STAY_EVERY
            idle = all(progress.idle for progress in self._progress.values())
            if now >= ends and idle:
                return
            if not idle:
                busy_at = now
            may_read = now < ends and self._ahead() < self._read_ahead
            if may_read and now >= read_at:
                batch = self._group.read(self._cursor, self._limit)
                if batch is not None:
                    busy_at = now
                    self._hand_out(batch)
                elif not self._group.more:
                    if idle and now >= busy_at + idle_timeout:
                        return
                    read_at = now + self._poll_interval
            wake_at = min(stay_at, read_at if may_read else math.inf, ends if now < ends else math.inf)
            self._settle(self._collect(wake_at))
            for progress in self._progress.values():
                progress.threads.refuse_stuck()

    @property
    def _stopping(self) -> bool:
        return self._stop() or self._fatal is not None

    def _ahead(self) -> int:
        """Return how many batches were read that the slowest handler has not finished."""
        return self._numbers - min(progress.checkpoint for progress in self._progress.values())

    def _hand_out(self, batch: Read) -> None:
        self._numbers += 1
        self._cursor = batch.cursor
        # Write these dead letters together with the cursor after the batch. If they were written earlier and the run
        # ended before that cursor was stored, the next run would write them again.
        lost = [failure for retry in batch.retries if (failure := self._lost(retry))]
        self._cursors.append((self._numbers, batch.cursor, lost))
        self._done = replace(
            self._done, batches=self._done.batches + 1, events=self._done.events + batch.count
        )
        for progress in self._progress.values():
            progress.add(self._numbers, batch.events, batch.retries)
        self._advance([])

    def _lost(self, retry: Retry) -> Failure | None:
        """Return a failure, for a dead letter, if a retry cannot be delivered to any handler; else None."""
        by = retry.event.subscriptions
        if retry.problem is not None:
            return Failure(retry.handler, by, retry.attempt, (retry.event,), retry.problem, None)
        if retry.handler not in self._progress:
            return Failure(
                retry.handler, by, retry.attempt, retry.events, "its group has no handler of this name", None
            )
        return None

    def _collect(self, until: float) -> list[Call]:
        """Wait for a call to end or to exceed its timeout, at most until a time. Return all such calls."""
        threads = [progress.threads for progress in self._progress.values()]
        deadlines = [deadline for each in threads if (deadline := each.next_deadline()) is not None]
        over: list[Call] = []
        wait = min([until, *deadlines]) - time.monotonic()
        with suppress(Empty):
            over += filter(None, [self._ended.get(timeout=max(wait, 0))])
            while True:
                over += filter(None, [self._ended.get_nowait()])
        for each in threads:
            over += each.overdue()
        return over

    def _finish_what_runs(self) -> list[Call]:
        """Start no more calls, and wait for the running calls."""
        over: list[Call] = []
        for progress in self._progress.values():
            progress.threads.close()
        while any(progress.threads.next_deadline() is not None for progress in self._progress.values()):
            over += self._collect(time.monotonic() + STAY_EVERY)
        return over + self._collect(0)

    def _settle(self, over: list[Call]) -> None:
        """Record calls that are over, and store the results of the batches that are finished with them."""
        finished: list[tuple[HandlerProgress, Work]] = []
        for call in over:
            progress = self._progress[call.delivery.handler]
            if call.error is not None:
                self._log_failure(progress.handler, call)
                if progress.handler.reliable and progress.handler.retries is None:
                    self._fatal = self._fatal or call
                    continue
            work = progress.end(call)
            if work is not None:
                finished.append((progress, work))
        self._advance(finished)

    def _advance(self, finished: list[tuple[HandlerProgress, Work]]) -> None:
        """Store the failures of finished batches with the cursor after them, then start the next batches.

        A batch without events for a handler is finished at once, so the cursor is stored again after the start.
        """
        failures = [
            failure
            for progress, work in finished
            if progress.handler.reliable
            for call in work.failed
            if call.error is not None
            for failure in self._failures(progress.handler, call, call.error)
        ]
        for progress, work in finished:
            progress.done(work)
        # Store the cursor before the next calls, so that unreliable handlers do not get the same events twice.
        self._keep(failures)
        for progress in self._progress.values():
            if not self._stopping:
                progress.begin()
        self._keep([])

    def _keep(self, failures: list[Failure]) -> None:
        """Store failures, together with the cursor after the batches that every reliable handler has finished."""
        lowest = min((progress.checkpoint for progress in self._reliable), default=self._numbers)
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
        """Return a failure for each part of the events that shares a subscription.

        Events of a part are retried together, in order. If a subscription is gone, only the events that came through it
        alone become dead letters.
        """
        delivery = call.delivery
        reached = [handler.reached_by(event) for event in delivery.events]
        if len(set(reached)) > 1:
            present = self._group.present(set().union(*reached))
            reached = [tuple(id for id in by if id in present) or by for by in reached]
        return [
            Failure(
                handler.name,
                subscriptions,
                delivery.attempt,
                tuple(events),
                described(error, [self._conninfo])[:LONGEST],
                handler.pause_after(delivery.attempt),
            )
            for subscriptions, events in together(delivery.events, reached)
        ]

    def _log_failure(self, handler: Handler, call: Call) -> None:
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
