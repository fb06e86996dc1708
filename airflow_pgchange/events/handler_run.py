"""A run of a group's handlers: what is read, who is called with it, and what is kept."""

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


class HandlerRun:
    """One run, on the thread that reads and writes; calls are made on threads of their own.

    ``ended`` gets the calls that have ended, and None by who asks to stop, which ``stop`` then says.
    No error that is kept shows the passwords of ``conninfo``.
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
        """Run until then, None: until the stop. Raises what ``EventHandlers.run`` does."""
        patience = idle_timeout
        if patience is None:
            patience = 0.0 if until == "empty" else math.inf
        try:
            self._work(until, patience)
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

    def _work(self, until: Literal["empty"] | float | None, patience: float) -> None:
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
                    if idle and now >= busy_at + patience:
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
        """How many batches the fastest handler may be ahead of the slowest."""
        return self._numbers - min(progress.checkpoint for progress in self._progress.values())

    def _hand_out(self, batch: Read) -> None:
        self._numbers += 1
        self._cursor = batch.cursor
        # Given up where the batch is passed: before, every run that does not come so far would give it up once more.
        lost = [failure for retry in batch.retries if (failure := self._lost(retry))]
        self._cursors.append((self._numbers, batch.cursor, lost))
        self._done = replace(
            self._done, batches=self._done.batches + 1, events=self._done.events + batch.count
        )
        for progress in self._progress.values():
            progress.add(self._numbers, batch.events, batch.retries)
        self._advance([])

    def _lost(self, retry: Retry) -> Failure | None:
        """A dead letter for what comes back to nobody."""
        by = retry.event.subscriptions
        if retry.problem is not None:
            return Failure(retry.handler, by, retry.attempt, (retry.event,), retry.problem, None)
        if retry.handler not in self._progress:
            return Failure(
                retry.handler, by, retry.attempt, retry.events, "its group has no handler of this name", None
            )
        return None

    def _collect(self, until: float) -> list[Call]:
        """The calls that have ended or are overdue; waits for the first of them, at most until a time."""
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
        """Begin no call any more, and wait for those that run."""
        over: list[Call] = []
        for progress in self._progress.values():
            progress.threads.close()
        while any(progress.threads.next_deadline() is not None for progress in self._progress.values()):
            over += self._collect(time.monotonic() + STAY_EVERY)
        return over + self._collect(0)

    def _settle(self, over: list[Call]) -> None:
        """Take note of calls that are over, and keep what came of the batches that are done with them."""
        finished: list[tuple[HandlerProgress, Work]] = []
        for call in over:
            progress = self._progress[call.delivery.handler]
            if call.error is not None:
                self._tell(progress.handler, call)
                if progress.handler.reliable and progress.handler.retries is None:
                    self._fatal = self._fatal or call
                    continue
            work = progress.end(call)
            if work is not None:
                finished.append((progress, work))
        self._advance(finished)

    def _advance(self, finished: list[tuple[HandlerProgress, Work]]) -> None:
        """Write the failures of finished batches together with the cursor behind those that are done, then go on with the
        next; of those some have nothing for a handler, and are done at once."""
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
        # Before the next calls: who is not reliable is not to get again what it is called with now.
        self._keep(failures)
        for progress in self._progress.values():
            if not self._stopping:
                progress.begin()
        self._keep([])

    def _keep(self, failures: list[Failure]) -> None:
        """Write failures together with the cursor behind the batches that every reliable handler has done, if it has
        moved on."""
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
        """One for all events that have a subscription in common, by which they come again in their order: if it is ended,
        the others still come."""
        delivery = call.delivery
        reached = [handler.reached_by(event) for event in delivery.events]
        if len(set(reached)) > 1:
            present = self._group.present(set().union(*reached))
            reached = [tuple(one for one in by if one in present) or by for by in reached]
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
