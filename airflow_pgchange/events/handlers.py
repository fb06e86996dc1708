"""Run the handlers of a group."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from airflow_pgchange.errors import InvalidArgument, Stopped
from airflow_pgchange.events.group import held_group
from airflow_pgchange.events.handler import Handler
from airflow_pgchange.events.handler_run import Handled, HandlerRun
from airflow_pgchange.events.handler_threads import Call
from airflow_pgchange.feeds.argument_checks import (
    EVENTS_LIMIT,
    Seconds,
    Until,
    check_count,
    check_group_name,
    patience,
    seconds,
)
from airflow_pgchange.feeds.argument_checks import until as checked_until
from airflow_pgchange.feeds.stopping import Stop


class EventHandlers:
    """Runs the handlers of one group, each at its own pace.

    While it runs it holds the group's lock, the same that ``read_next_events`` and ``EventFeed`` take, so there is no
    other reader. If another process holds the lock, ``run`` waits up to ``busy_timeout``; None: without limit. The
    fastest handler is at most ``read_ahead`` batches of ``limit`` events ahead of the slowest. The stored cursor is the
    position of the slowest reliable handler. Each handler gets events in the order of dispatch, unless its ``key`` lets
    events run in parallel.

    Guarantee: a reliable handler gets each event at least once. If a run ends before an event is finished, or before the
    cursor is stored, the event comes again, to all handlers of the group. If no handler of the group is reliable, each
    event comes at most once.

    Needs its own session: no pooler in transaction mode. Up to ``read_ahead`` + 1 batches of ``limit`` events are in
    memory. Raises InvalidArgument for invalid arguments.
    """

    def __init__(
        self,
        group: str,
        handlers: Sequence[Handler],
        conninfo: str,
        *,
        limit: int = EVENTS_LIMIT,
        read_ahead: int = 10,
        poll_interval: Seconds = 0.1,
        busy_timeout: Seconds | None = 0,
    ) -> None:
        check_group_name(group)
        names = [handler.name for handler in handlers]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument(
                f"group {group}: give at least one handler, each a name of its own: {names}"
            )
        check_count("limit", limit)
        check_count("read_ahead", read_ahead)
        self.group = group
        self.handlers = tuple(handlers)
        self._conninfo = conninfo
        self._limit = limit
        self._read_ahead = read_ahead
        self._poll_interval = seconds("poll_interval", poll_interval)
        self._busy_timeout = patience("busy_timeout", busy_timeout)
        self._stop = Stop()
        self._ended: SimpleQueue[Call | None] = SimpleQueue()

    def run(self, until: Until | None = None, idle_timeout: Seconds | None = None) -> Handled:
        """Handle events until none is ready (``empty``), for a length of time, or until ``stop``.

        The run also ends once no event has come for ``idle_timeout``. None means 0 with ``empty``, and no limit
        otherwise. At the end, batches that were read are finished; after ``stop``, only running calls are finished.

        Raises UnknownConsumer if the group does not exist, ConsumerBusy if another process holds its lock, DispatchEnded,
        ConnectionLost, and HandlerFailed. After an error, unfinished events come again in the next run, and only calls
        past their timeout still run.
        """
        end = None if until is None else checked_until("until", until)
        idle_seconds = patience("idle_timeout", idle_timeout)
        try:
            with held_group(self._conninfo, self.group, self._busy_timeout, self._stop) as group:
                # A new queue for each run: a call that outlives an interrupted run must not reach the next run.
                self._ended = SimpleQueue()
                run = HandlerRun(
                    group,
                    self.handlers,
                    self._ended,
                    self._stop,
                    conninfo=self._conninfo,
                    limit=self._limit,
                    read_ahead=self._read_ahead,
                    poll_interval=self._poll_interval,
                )
                return run.work(end, idle_seconds)
        except Stopped:
            return Handled()

    def stop(self) -> None:
        """End ``run`` soon, and permanently. Safe in other threads and in a signal handler."""
        self._stop.ask()
        self._ended.put(None)
