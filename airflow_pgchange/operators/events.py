"""The event log: publishing, subscribing, dispatching and replaying."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_pgchange.arguments import Seconds, Until, patience, seconds, until_of
from airflow_pgchange.events import Event, Selection, publish, subscribe, topical
from airflow_pgchange.events.dispatch import WITHIN, dispatch
from airflow_pgchange.events.replay import replay, rewind
from airflow_pgchange.feeds.checks import check_count
from airflow_pgchange.feeds.errors import InvalidArgument, Stopped
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.stopping import Stop

if TYPE_CHECKING:
    from airflow.sdk import Context

GIVEN = ("topic", "payload", "metadata", "at", "subscription_id", "id")


class PublishEventsOperator(BaseOperator):
    """Publishes events, all in one transaction or none.

    Guarantee: at least once. A task that is tried again after it had committed publishes again. Give an event an ``id``
    of your own if it must not: as long as the log keeps the event (``partition_retention_period``) such a try fails,
    and nothing is there twice.

    :param events: events, or mappings with ``topic`` and, if you like, ``payload``, ``metadata``, ``at`` (a time with a
        zone, or its ISO 8601 text: delivered when it has come), ``subscription_id`` (for it alone) and ``id``; or the
        JSON of a list of those (templated)
    :param postgres_conn_id: the database of the event log
    """

    template_fields: Sequence[str] = ("events", "postgres_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"events": "json"}

    def __init__(
        self,
        *,
        events: Sequence[Event | Mapping[str, Any]] | str,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # What an upstream task returns, or a template, is there only when the task runs.
        self.events: Any = [_given(event) for event in events] if _is_list(events) else events
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> int:
        """Returns how many events were published."""
        wanted = _events(self.events)
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            publish(connection, wanted)
        self.log.info("published %d events", len(wanted))
        return len(wanted)


class SubscribeOperator(BaseOperator):
    """Subscribes a group to events that are dispatched from now on.

    Guarantee: exactly once. Doing it again only sets the expiry that is given last; other topics, or another selection,
    are one more subscription beside the first.

    Raises InvalidArgument for both or neither of topics and selection, or a selection with what goes with topics, Refused
    for a condition that PostgreSQL does not take, PermissionDenied for a new one that the role may not add.

    :param group: the group, which is made if it is not there (templated)
    :param topics: the topics that it gets, one or a list of them, or the JSON of a list (templated)
    :param partition: ``(k, n)``: only part k of n, counted from 0; the n parts together get every event. With topics
    :param by: the field of the payload by which events are parted; default: their ids. With topics
    :param selection: instead of topics: any SQL over event and subscription, which runs with the rights of the owner
        of the schema. It has its own conditions and expiry
    :param expiry: remove the subscription when nobody has used it for so long, at least a minute. With topics
    :param postgres_conn_id: the database of the event log
    """

    template_fields: Sequence[str] = ("group", "topics", "postgres_conn_id")

    def __init__(
        self,
        *,
        group: str,
        topics: Sequence[str] | str | None = None,
        partition: tuple[int, int] | None = None,
        by: str | None = None,
        selection: Selection | None = None,
        expiry: timedelta | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if (topics is None) == (selection is None):
            raise InvalidArgument("say which events: either topics or selection")
        if selection is not None and (partition, by, expiry) != (None, None, None):
            raise InvalidArgument(
                "partition, by and expiry go with topics: a Selection has its own conditions and expiry"
            )
        self.group = group
        self.topics = topics
        self.partition = partition
        self.by = by
        self.selection = selection
        self.expiry = expiry
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> str:
        """Returns the id of the subscription."""
        chosen = self.selection
        if chosen is None:
            chosen = topical(_topics(self.topics), partition=self.partition, by=self.by, expiry=self.expiry)
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            made = subscribe(connection, self.group, chosen)
        self.log.info("group %s has subscription %s", self.group, made)
        return made


class PollEventsOperator(BaseOperator):
    """Dispatches published events to the groups that subscribe to them. Safe to run side by side: one polls at a time.

    Feeds and handlers dispatch by themselves; this is for readers that only call ``read_next_events``. Guarantee: each
    event is dispatched to each matching subscription exactly once. Raises DispatchEnded where a condition does not end,
    Stopped when the task is killed.

    :param until: ``empty``: until nothing is left, or somebody else dispatches; or so many seconds (templated)
    :param poll_every: seconds, or a timedelta, until the next poll where nothing is left
    :param within: seconds, or a timedelta, that a chunk of events may take: with more the task fails, and names the
        condition that is too slow, or does not end
    :param postgres_conn_id: the database of the event log
    """

    template_fields: Sequence[str] = ("until", "postgres_conn_id")

    def __init__(
        self,
        *,
        until: Until = "empty",
        poll_every: Seconds = 0.1,
        within: Seconds = WITHIN,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.until = until
        self.poll_every = seconds("poll_every", poll_every)
        self.within = seconds("within", within)
        self.postgres_conn_id = postgres_conn_id
        self._stop = Stop()

    def execute(self, context: Context) -> int:
        """Returns how many pairs of event and subscription were dispatched."""
        until, total = until_of(self.until), 0
        ends = math.inf if until == "empty" else time.monotonic() + until
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            while not self._stop():
                done = dispatch(connection, self.within)
                total += done.pairs
                left = ends - time.monotonic()
                if left <= 0 or (until == "empty" and not done.more):
                    break
                if not done.more:
                    self._stop.rest(min(self.poll_every, left))
        self.log.info("dispatched %d times an event to a subscription", total)
        if self._stop():
            raise Stopped(
                "the task was killed; what it dispatched stays so, and the next poll goes on behind it"
            )
        return total

    def on_kill(self) -> None:
        """Stop behind the chunk in work."""
        self._stop.ask()


class ReplayEventsOperator(BaseOperator):
    """Gives a group again what was published since a time, as far as the log still has it.

    With ``subscription_id`` only what fits that subscription, only to it, and also what was published before it
    subscribed: as new events behind all others, with ``replay_of`` in their metadata. Without it the group's cursor goes
    back, so that all its handlers get again what was dispatched to the group. Guarantee: at least once; a task that is
    tried again after it had committed replays again.

    With ``subscription_id`` the role needs ``pgmb.grant_writer`` beside ``pgmb.grant_consumer``, as it publishes.
    Raises UnknownConsumer for a group or a subscription that is not there, ConsumerBusy while somebody holds the group
    for longer than ``wait_for``, InvalidArgument for something that is not a time.

    :param group: the group (templated)
    :param since: the time, with a zone, or its ISO 8601 text (templated)
    :param subscription_id: the subscription (templated)
    :param max_events: events that are replayed to a subscription, at most
    :param wait_for: how long to wait for who holds the group, to move its cursor: seconds, or a timedelta; None: as long
        as it takes
    :param postgres_conn_id: the database of the event log
    """

    template_fields: Sequence[str] = ("group", "since", "subscription_id", "postgres_conn_id")

    def __init__(
        self,
        *,
        group: str,
        since: datetime | str,
        subscription_id: str | None = None,
        max_events: int = 100_000,
        wait_for: Seconds | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_count("max_events", max_events)
        self.group = group
        self.since = since
        self.subscription_id = subscription_id
        self.max_events = max_events
        self.wait_for = patience("wait_for", wait_for)
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> int | None:
        """Returns how many events were replayed to the subscription; None where the cursor was moved."""
        hook, since = PgChangeHook(self.postgres_conn_id), _time("since", self.since)
        if not self.subscription_id:
            rewind(hook.conninfo(), self.group, since, self.wait_for)
            self.log.info("group %s reads again from %s", self.group, since)
            return None
        with hook.get_conn(primary=True) as connection:
            count = replay(connection, self.group, self.subscription_id, since, self.max_events)
        if count == self.max_events:
            self.log.warning("there may be more than the %d events that were replayed", count)
        self.log.info("subscription %s gets %d events again", self.subscription_id, count)
        return count


def _time(name: str, value: datetime | str) -> datetime:
    try:
        return value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{name}: {value!r:.300} is not a time: write it as 2026-01-31T12:00:00+00:00"
        ) from error


def _topics(given: Any) -> Any:
    """A template's list arrives as text; a topic in its place would get nothing, and say nothing."""
    if not isinstance(given, str) or not given.startswith("["):
        return given
    try:
        return json.loads(given)
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"topics: {given!r:.300} is not the JSON of a list: end the template with `| tojson`"
        ) from error


def _given(event: Any) -> Any:
    """An event as something that Airflow can render, show and store."""
    if not isinstance(event, Event):
        return event
    given = {name: getattr(event, name) for name in GIVEN}
    at = None if event.at is None else event.at.isoformat()
    return {name: value for name, value in {**given, "at": at}.items() if value is not None}


def _events(given: Any) -> list[Event]:
    """Raises InvalidArgument for anything but a list of events."""
    try:
        events = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        events = None
    if not _is_list(events) or not all(isinstance(event, Mapping) for event in events):
        raise InvalidArgument(
            f"events are a list of mappings with a topic each, or its JSON, not {given!r:.300}"
        )
    return [_event(event) for event in events]


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _event(given: Mapping[str, Any]) -> Event:
    unknown = sorted(str(name) for name in set(given) - set(GIVEN))
    if unknown or "topic" not in given:
        raise InvalidArgument(
            f"an event has {', '.join(GIVEN)}, topic at least, and not {', '.join(unknown) or 'no topic'}"
        )
    values = {
        name: given[name] for name in given if given[name] not in (None, "") or name in ("topic", "payload")
    }
    if "at" in values:
        values["at"] = _time("at", values["at"])
    return Event(**values)
