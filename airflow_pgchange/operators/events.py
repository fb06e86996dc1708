"""Operators of the event log: publish, subscribe and replay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events import Event, publish, subscribe, topical
from airflow_pgchange.events.replay import replay, rewind
from airflow_pgchange.feeds.argument_checks import BATCH_LIMIT, Seconds, time_of
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, Number, checks

if TYPE_CHECKING:
    from airflow.sdk import Context

EVENT_FIELDS = ("topic", "payload", "metadata", "at", "subscription_id", "id")


def _topics(name: str, value: Any) -> Any:
    """Parse a list that a template has rendered as text. As a topic, such a text would match no event."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{name}: {value!r:.300} is not the JSON of a list: end the template with `| tojson`"
        ) from error


def _event_mappings(name: str, value: Any) -> list[dict[str, Any]]:
    """Return events as dictionaries, which Airflow can render, show and store."""
    try:
        events = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        events = None
    if (
        not isinstance(events, Sequence)
        or isinstance(events, str)
        or not all(isinstance(event, Event | Mapping) for event in events)
    ):
        raise InvalidArgument(
            f"{name} must be a list of mappings with a topic each, or its JSON, not {value!r:.300}"
        )
    return [_plain(event) if isinstance(event, Event) else dict(event) for event in events]


def _plain(event: Event) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in EVENT_FIELDS}
    at = None if event.at is None else event.at.isoformat()
    return {name: value for name, value in {**fields, "at": at}.items() if value is not None}


class PublishEventsOperator(CheckedArguments, BaseOperator):
    """Publishes events in one transaction: all of them or none.

    Guarantee: at least once. A task that is retried after its commit publishes again. To prevent this, give each event
    your own ``id``. As long as the log keeps the event (``partition_retention_period``), the retry then fails and no
    event is published twice.

    :param events: a list of events, or of mappings, or its JSON (templated). A mapping has ``topic``, and optionally
        ``payload``, ``metadata``, ``at``, ``subscription_id`` and ``id``. ``at`` is the time of delivery, with its zone
        or as ISO 8601 text. With ``subscription_id`` only this subscription gets the event
    :param postgres_conn_id: the database of the event log
    """

    arguments = checks("postgres_conn_id", events=_event_mappings)
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"events": "json"}

    def __init__(
        self,
        *,
        events: Sequence[Event | Mapping[str, Any]] | str,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.events: Any = events
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> int:
        """Return the number of published events."""
        events = [_event(event) for event in self.events]
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            publish(connection, events)
        self.log.info("published %d events", len(events))
        return len(events)


class SubscribeEventsOperator(CheckedArguments, BaseOperator):
    """Subscribes a group to events that are dispatched from now on.

    Guarantee: exactly once. Repeating it with the same topics only sets the new expiry. With other topics it adds
    another subscription. For conditions of your own use ``airflow_pgchange.events.subscribe``.

    Raises InvalidArgument for an invalid topic, PermissionDenied if the role may not subscribe.

    :param group: the group, which is created if it does not exist (templated)
    :param topics: a topic, a list of topics, or its JSON (templated)
    :param partition: ``(k, n)``: subscribe only to part k of n, counted from 0. The n parts together get every event
    :param by: the field of the payload that assigns an event to a part; default: the event's id
    :param expiry: remove the subscription when nobody has used it for this long, at least a minute (templated)
    :param postgres_conn_id: the database of the event log
    """

    arguments = checks("group", "expiry", "postgres_conn_id", topics=_topics)
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        group: str,
        topics: Sequence[str] | str,
        partition: tuple[int, int] | None = None,
        by: str | None = None,
        expiry: Seconds | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.group = group
        self.topics: Any = topics
        self.partition = partition
        self.by = by
        self.expiry = expiry
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> str:
        """Return the id of the subscription."""
        chosen = topical(self.topics, partition=self.partition, by=self.by, expiry=self.expiry)
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            made = subscribe(connection, self.group, chosen)
        self.log.info("group %s: subscribed with subscription %s", self.group, made)
        return made


class ReplayEventsOperator(CheckedArguments, BaseOperator):
    """Delivers the events since a time to a group again, as far as the log still has them.

    Without ``subscription_id`` the group's cursor is moved back: all handlers get again the events that were dispatched
    to the group. With ``subscription_id`` only this subscription gets events again, and only those that match it. They
    include events from before it subscribed. They are published as new events, after all others, with ``replay_of`` in
    their metadata. The role then needs ``pgmb.grant_writer`` besides ``pgmb.grant_consumer``.

    Guarantee: at least once. A task that is retried after its commit replays again.

    Raises UnknownConsumer if the group or the subscription does not exist, and InvalidArgument if ``since`` is not a
    time. Raises ConsumerBusy if another process holds the group for longer than ``busy_timeout``.

    :param group: the group (templated)
    :param since: the time, with a zone, or its ISO 8601 text (templated)
    :param subscription_id: the subscription (templated)
    :param limit: replay at most this many events to the subscription (templated)
    :param busy_timeout: how long to wait until nobody holds the group, to move its cursor; None: as long as it takes
        (templated)
    :param postgres_conn_id: the database of the event log
    """

    arguments = checks("group", "since", "subscription_id", "limit", "busy_timeout", "postgres_conn_id")
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        group: str,
        since: datetime | str,
        subscription_id: str | None = None,
        limit: Number = BATCH_LIMIT,
        busy_timeout: Seconds | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.group = group
        self.since: Any = since
        self.subscription_id = subscription_id
        self.limit: Any = limit
        self.busy_timeout = busy_timeout
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> int | None:
        """Return the number of events that were replayed to the subscription; None if the cursor was moved."""
        hook = PgChangeHook(self.postgres_conn_id)
        if not self.subscription_id:
            rewind(hook.conninfo(), self.group, self.since, self.busy_timeout)
            self.log.info(
                "group %s: moved back to %s, and will read the events since then again",
                self.group,
                self.since,
            )
            return None
        with hook.get_conn(primary=True) as connection:
            count = replay(connection, self.group, self.subscription_id, self.since, self.limit)
        if count == self.limit:
            self.log.warning(
                "group %s: reached the limit of %d events; the log may have more events to replay",
                self.group,
                count,
            )
        self.log.info(
            "group %s: replayed %d events to subscription %s", self.group, count, self.subscription_id
        )
        return count


def _event(fields: Mapping[str, Any]) -> Event:
    unknown = sorted(str(name) for name in set(fields) - set(EVENT_FIELDS))
    if unknown or "topic" not in fields:
        raise InvalidArgument(
            f"an event needs a topic, and may have {', '.join(EVENT_FIELDS)}, but this event has "
            f"{', '.join(unknown) or 'no topic'}"
        )
    values = {
        name: fields[name]
        for name in fields
        if fields[name] not in (None, "") or name in ("topic", "payload")
    }
    if "at" in values:
        values["at"] = time_of("at", values["at"])
    return Event(**values)
