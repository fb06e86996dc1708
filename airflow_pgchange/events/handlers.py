"""Running the handlers of a group."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from airflow_pgchange.errors import InvalidArgument, Stopped
from airflow_pgchange.events.group import held_group
from airflow_pgchange.events.handler import Handler
from airflow_pgchange.events.handler_run import Handled, HandlerRun
from airflow_pgchange.events.handler_threads import Call
from airflow_pgchange.feeds.checks import (
    EVENTS_LIMIT,
    Seconds,
    Until,
    check_count,
    check_group_name,
    patience,
    seconds,
)
from airflow_pgchange.feeds.checks import until as checked_until
from airflow_pgchange.feeds.stopping import Stop


class EventHandlers:
    """Runs the named handlers of one group, each at its own pace.

    It holds the group by the lock that ``read_next_events`` and ``EventFeed`` take, so nobody else reads it meanwhile. A
    fast handler is ahead of the slowest by at most ``read_ahead`` batches of at most ``limit`` events, and the
    stored cursor is where the slowest reliable one is. Every handler gets the events in the order of dispatch, those of
    another key excepted. While somebody else holds the group, ``run`` waits up to ``busy_timeout``, None: as
    long as it takes.

    Guarantee: a reliable handler gets each event at least once; one that was not finished when a run ended, or whose
    cursor could not be stored, comes again, to all handlers of the group. Others get it at most once where no handler of
    the group is reliable.
    Needs a session of its own: no pooler in transaction mode. Up to ``read_ahead`` batches and one of ``limit``
    events are in memory. Raises InvalidArgument for invalid arguments.
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
        """Handle events until none is ready (``empty``), for so long, or until ``stop``; with ``idle_timeout`` until
        nothing has come for so long, None: at once with ``empty``, else never.

        What was read is finished; ``stop`` finishes only the calls that run. Raises UnknownConsumer where there is no
        such group, ConsumerBusy where somebody else holds it, DispatchEnded, ConnectionLost, and HandlerFailed; in every
        case nothing runs on but calls past their timeout, and what was not finished comes again.
        """
        ends = None if until is None else checked_until("until", until)
        quiet = patience("idle_timeout", idle_timeout)
        try:
            with held_group(self._conninfo, self.group, self._busy_timeout, self._stop) as group:
                # Each run has its own: a call that outlives a run that was interrupted is nothing to the next.
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
                return run.work(ends, quiet)
        except Stopped:
            return Handled()

    def stop(self) -> None:
        """End ``run`` soon and for good, from another thread or from a signal's handler."""
        self._stop.ask()
        self._ended.put(None)
