"""The event log: publishing, subscribing and replaying."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events import Event, publish, subscribe, topical
from airflow_pgchange.events.replay import replay, rewind
from airflow_pgchange.feeds.checks import BATCH_LIMIT, Seconds, time_of
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, Number, checks

if TYPE_CHECKING:
    from airflow.sdk import Context

GIVEN = ("topic", "payload", "metadata", "at", "subscription_id", "id")


def _topics(name: str, given: Any) -> Any:
    """A template's list arrives as text; a topic in its place would get nothing, and say nothing."""
    if not isinstance(given, str) or not given.startswith("["):
        return given
    try:
        return json.loads(given)
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{name}: {given!r:.300} is not the JSON of a list: end the template with `| tojson`"
        ) from error


def _given(name: str, given: Any) -> list[dict[str, Any]]:
    """Events as something that Airflow can render, show and store."""
    try:
        events = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        events = None
    if (
        not isinstance(events, Sequence)
        or isinstance(events, str)
        or not all(isinstance(event, Event | Mapping) for event in events)
    ):
        raise InvalidArgument(
            f"{name} are a list of mappings with a topic each, or its JSON, not {given!r:.300}"
        )
    return [_plain(event) if isinstance(event, Event) else dict(event) for event in events]


def _plain(event: Event) -> dict[str, Any]:
    given = {name: getattr(event, name) for name in GIVEN}
    at = None if event.at is None else event.at.isoformat()
    return {name: value for name, value in {**given, "at": at}.items() if value is not None}


class PublishEventsOperator(CheckedArguments, BaseOperator):
    """Publishes events, all in one transaction or none.

    Guarantee: at least once. A task that is tried again after it had committed publishes again. Give an event an ``id``
    of your own if it must not: as long as the log keeps the event (``partition_retention_period``) such a try fails,
    and nothing is there twice.

    :param events: events, or mappings with ``topic`` and, if you like, ``payload``, ``metadata``, ``at`` (a time with a
        zone, or its ISO 8601 text: delivered when it has come), ``subscription_id`` (for it alone) and ``id``; or the
        JSON of a list of those (templated)
    :param postgres_conn_id: the database of the event log
    """

    arguments = checks("postgres_conn_id", events=_given)
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
        """Returns how many events were published."""
        wanted = [_event(event) for event in self.events]
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            publish(connection, wanted)
        self.log.info("published %d events", len(wanted))
        return len(wanted)


class SubscribeEventsOperator(CheckedArguments, BaseOperator):
    """Subscribes a group to events that are dispatched from now on.

    Guarantee: exactly once. Doing it again only sets the expiry that is given last; other topics are
    one more subscription beside the first. Conditions of your own are ``airflow_pgchange.events.subscribe``'s.

    Raises InvalidArgument for what is no topic, PermissionDenied where the role may not subscribe.

    :param group: the group, which is made if it is not there (templated)
    :param topics: the topics that it gets, one or a list of them, or the JSON of a list (templated)
    :param partition: ``(k, n)``: only part k of n, counted from 0; the n parts together get every event
    :param by: the field of the payload by which events are parted; default: their ids
    :param expiry: remove the subscription when nobody has used it for so long, at least a minute (templated)
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
        """Returns the id of the subscription."""
        chosen = topical(self.topics, partition=self.partition, by=self.by, expiry=self.expiry)
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            made = subscribe(connection, self.group, chosen)
        self.log.info("group %s has subscription %s", self.group, made)
        return made


class ReplayEventsOperator(CheckedArguments, BaseOperator):
    """Gives a group again what was published since a time, as far as the log still has it.

    With ``subscription_id`` only what fits that subscription, only to it, and also what was published before it
    subscribed: as new events behind all others, with ``replay_of`` in their metadata. Without it the group's cursor goes
    back, so that all its handlers get again what was dispatched to the group. Guarantee: at least once; a task that is
    tried again after it had committed replays again.

    With ``subscription_id`` the role needs ``pgmb.grant_writer`` beside ``pgmb.grant_consumer``, as it publishes.
    Raises UnknownConsumer for a group or a subscription that is not there, ConsumerBusy while somebody holds the group
    for longer than ``busy_timeout``, InvalidArgument for something that is not a time.

    :param group: the group (templated)
    :param since: the time, with a zone, or its ISO 8601 text (templated)
    :param subscription_id: the subscription (templated)
    :param limit: events that are replayed to a subscription, at most (templated)
    :param busy_timeout: how long to wait for who holds the group, to move its cursor; None: as long as it takes
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
        """Returns how many events were replayed to the subscription; None where the cursor was moved."""
        hook = PgChangeHook(self.postgres_conn_id)
        if not self.subscription_id:
            rewind(hook.conninfo(), self.group, self.since, self.busy_timeout)
            self.log.info("group %s reads again from %s", self.group, self.since)
            return None
        with hook.get_conn(primary=True) as connection:
            count = replay(connection, self.group, self.subscription_id, self.since, self.limit)
        if count == self.limit:
            self.log.warning("there may be more than the %d events that were replayed", count)
        self.log.info("subscription %s gets %d events again", self.subscription_id, count)
        return count


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
        values["at"] = time_of("at", values["at"])
    return Event(**values)
