"""The operator that runs the handlers of a group of the event log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowSkipException, BaseOperator

from airflow_pgchange.errors import ConsumerBusy, InvalidArgument, Stopped
from airflow_pgchange.events import EventHandlers, Handler
from airflow_pgchange.feeds.argument_checks import EVENTS_LIMIT, OnBusy, Seconds, Until
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, Number, checks

if TYPE_CHECKING:
    from airflow.sdk import Context


class EventHandlersOperator(CheckedArguments, BaseOperator):
    """Holds a group and runs its handlers, each at its own pace, until no event is left or for a length of time.

    Guarantee: a reliable handler gets each event at least once; ``delivery.key`` is the key for its results in other
    systems. Other handlers get each event at most once if no handler of the group is reliable, see EventHandlers. Events
    that a handler gives up after its last retry become a dead letter. A task that is killed finishes the running calls
    and stores its progress.

    Raises HandlerFailed if a handler with ``retries=None`` fails, and Stopped if the task is killed. Raises
    ConsumerBusy if another run holds the group, and UnknownConsumer if it does not exist. Raises DispatchEnded if the
    evaluation of a condition takes too long.

    :param group: the group (templated)
    :param handlers: its handlers
    :param until: ``empty``: work until nothing is ready, and leave retries that are due later for another run. Or a
        length of time (templated)
    :param idle_timeout: end when no event has come for this long; None: with ``empty`` at once, otherwise never
        (templated)
    :param limit: the maximum of events in a batch (templated)
    :param read_ahead: how many batches a fast handler may be ahead of the slowest (templated)
    :param on_busy: if another run holds the group: ``wait`` for it, ``skip`` the task, or ``fail`` (templated)
    :param busy_timeout: how long ``wait`` waits for the group; None: as long as it takes (templated)
    :param skip_if_empty: skip the task if no event was read; otherwise it succeeds
    :param postgres_conn_id: the database of the event log, without a pooler in transaction mode
    """

    arguments = checks(
        "group", "until", "idle_timeout", "limit", "read_ahead", "on_busy", "busy_timeout", "postgres_conn_id"
    )
    template_fields: Sequence[str] = tuple(arguments)
    shallow_copy_attrs: Sequence[str] = ("handlers",)

    def __init__(
        self,
        *,
        group: str,
        handlers: Sequence[Handler],
        until: Until = "empty",
        idle_timeout: Seconds | None = None,
        limit: Number = EVENTS_LIMIT,
        read_ahead: Number = 10,
        on_busy: OnBusy = "wait",
        busy_timeout: Seconds | None = None,
        skip_if_empty: bool = False,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.group = group
        self.handlers = _checked(handlers)
        self.until: Any = until
        self.idle_timeout: Any = idle_timeout
        self.limit: Any = limit
        self.read_ahead: Any = read_ahead
        self.on_busy = on_busy
        self.busy_timeout = busy_timeout
        self.skip_if_empty = skip_if_empty
        self.postgres_conn_id = postgres_conn_id
        self._running: EventHandlers | None = None
        self._stop = Stop()

    def execute(self, context: Context) -> dict[str, int]:
        """Return ``{batches, events, failed, retried, given_up}``."""
        self._running = EventHandlers(
            self.group,
            self.bound(context),
            PgChangeHook(self.postgres_conn_id).conninfo(),
            limit=self.limit,
            read_ahead=self.read_ahead,
            busy_timeout=self.busy_timeout if self.on_busy == "wait" else 0,
        )
        # The task may have been killed before self._running was set.
        if self._stop():
            self._running.stop()
        try:
            done = self._running.run(self.until, self.idle_timeout)
        except ConsumerBusy as error:
            if self.on_busy == "skip":
                raise AirflowSkipException(f"group {self.group} is held by another run") from error
            raise
        self.log.log(
            logging.WARNING if done.given_up else logging.INFO,
            "group %s: %d events in %d batches; %d calls failed, %d are tried again later, %d became dead letters%s",
            self.group,
            done.events,
            done.batches,
            done.failed,
            done.retried,
            done.given_up,
            " (airflow-pgchange letters list)" if done.given_up else "",
        )
        if self._stop():
            raise Stopped(f"group {self.group}: the task was killed; events that were not handled come again")
        if self.skip_if_empty and not done.batches:
            raise AirflowSkipException(f"group {self.group}: nothing is ready")
        return asdict(done)

    def bound(self, context: Context) -> Sequence[Handler]:
        """Return the handlers in the form in which a run with this context calls them."""
        return self.handlers

    def on_kill(self) -> None:
        """Let the running calls finish, and begin no other."""
        self._stop.ask()
        if self._running is not None:
            self._running.stop()


def _checked(handlers: Any) -> Sequence[Handler]:
    """Return the handlers. Raises InvalidArgument for a function, which has no name and no retries."""
    is_list = isinstance(handlers, list | tuple)
    wrong = [each for each in handlers if not isinstance(each, Handler)] if is_list else [handlers]
    if wrong:
        raise InvalidArgument(
            f"handlers must be a list of Handler objects, not {wrong[0]!r:.300}: write "
            "handlers=[Handler('history', keep_history)]"
        )
    sequence: Sequence[Handler] = handlers
    return sequence
