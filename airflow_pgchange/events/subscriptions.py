"""Subscriptions: which events a group gets."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds, check_group_name, is_sendable, seconds, span
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask, select

TOPICAL = "s.params @> jsonb_build_object('topics', jsonb_build_array(e.topic))"
PART_OF = "pgmb.event_partition(coalesce(e.payload ->> (s.params ->> 'by'), e.id), (s.params ->> 'partitions')::integer)"
PARTITIONED = f"{TOPICAL} and {PART_OF} = (s.params ->> 'partition')::integer"

LEAST_EXPIRY = timedelta(minutes=1)
"""Minimum expiry. Handlers and streams send heartbeats every few seconds, so a shorter expiry could end them."""


@dataclass(frozen=True)
class Selection:
    """The events that a subscription gets.

    ``conditions`` is an SQL condition on ``e``, the event, and ``s``, the subscription, with its ``params``. It runs with
    the rights of the schema's owner. Dispatching is faster if subscriptions share a condition and differ in ``params``. A
    subscription that is unused for ``expiry``, at least a minute, is removed. Raises InvalidArgument for empty conditions
    or a shorter expiry.
    """

    conditions: str = "TRUE"
    params: Mapping[str, Any] = field(default_factory=dict)
    expiry: Seconds | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.conditions, str) or not self.conditions.strip():
            raise InvalidArgument("conditions is SQL that says yes or no of an event: TRUE for every event")
        if not isinstance(self.params, Mapping):
            raise InvalidArgument(
                f"params is a mapping, which conditions find as s.params, not {self.params!r:.300}"
            )
        _check_json(self.params)
        if self.expiry is not None:
            seconds("expiry", self.expiry, least=LEAST_EXPIRY)


def topical(
    topics: Collection[str] | str,
    *,
    partition: tuple[int, int] | None = None,
    by: str | None = None,
    expiry: Seconds | None = None,
) -> Selection:
    """Return the selection of the events of some topics.

    ``partition=(k, n)`` selects partition ``k`` of ``n``, counted from 0; each event is in exactly one partition. The
    field ``by`` of the payload determines the partition, so events with the same value stay together and in order.
    Without ``by``, or if the payload lacks the field, the event's id determines it. The conditions of these selections
    are allowed in every database. Raises InvalidArgument for no topic and for an invalid partition.
    """
    names = [topics] if isinstance(topics, str) else topics
    if not (
        isinstance(names, Collection)
        and names
        and all(isinstance(name, str) and name and is_sendable(name) for name in names)
    ):
        raise InvalidArgument(f"name at least one topic, not {topics!r:.300}")
    params: dict[str, Any] = {"topics": sorted(set(names))}
    if partition is None:
        if by is not None:
            raise InvalidArgument("by says how events are parted: say which part with partition=(k, n)")
        return Selection(TOPICAL, params, expiry)
    match partition:
        # Exclude bool, which is a subclass of int.
        case (int() as k, int() as n) if bool not in (type(k), type(n)) and 0 <= k < n < 2**31:
            params |= {"partition": k, "partitions": n}
        case _:
            raise InvalidArgument(
                f"partition is (k, n), with k from 0 to n less one, and not {partition!r:.300}"
            )
    if by is not None:
        if not isinstance(by, str):
            raise InvalidArgument(f"by must be the name of a field, not {by!r:.300}")
        params["by"] = by
    return Selection(PARTITIONED, params, expiry)


def subscribe(connection: psycopg.Connection[Any], group: str, selection: Selection | None = None) -> str:
    """Subscribe a group to events that are dispatched from now on, and create the group if it does not exist.

    Without a selection the group gets all events. Returns the subscription's id. A second call with the same conditions
    and params returns the same subscription, and sets its expiry.

    Raises Refused if PostgreSQL rejects the condition, PermissionDenied if this role may not add a new condition, and
    InvalidArgument for an invalid group name.
    """
    query, values = subscribing(group, selection or Selection())
    return str(ask(connection, query, values))


def subscribing(group: str, selection: Selection) -> tuple[LiteralString, list[Any]]:
    """Return the statement that subscribes a group, and its values.

    The statement returns the subscription's id and its creation time.
    """
    check_group_name(group)
    if not isinstance(selection, Selection):
        raise InvalidArgument(f"a subscription needs a Selection or topical(...), not {selection!r:.300}")
    query: LiteralString = (
        "insert into pgmb.subscriptions (group_id, conditions_sql, params, expiry_interval) values (%s, %s, %s, %s) "
        "on conflict (identity) do update set last_active_at = now(), expiry_interval = excluded.expiry_interval "
        "returning id, created_at"
    )
    return query, [
        group,
        selection.conditions,
        Jsonb(dict(selection.params)),
        span("expiry", selection.expiry),
    ]


def unsubscribe(connection: psycopg.Connection[Any], subscription_id: str) -> bool:
    """Delete a subscription, and events that wait for it alone, such as retries. Return False if it does not exist."""
    with translated():
        query = "delete from pgmb.subscriptions where id = %s"
        return connection.execute(query, [subscription_id]).rowcount == 1


def heartbeat(connection: psycopg.Connection[Any], group: str) -> int:
    """Keep a group's subscriptions from expiring. Return how many were updated.

    Frequent calls are cheap: a row is only updated after a tenth of its expiry.
    """
    return int(ask(connection, select("pgmb.keep_alive", group)))


def _check_json(params: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(dict(params), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"params are not JSON: {error}") from error
    # PostgreSQL cannot store the character NUL, which JSON writes as \u0000.
    if not is_sendable(text) or "\\u0000" in text.replace("\\\\", ""):
        raise InvalidArgument(f"params have text that PostgreSQL cannot hold: {params!r:.300}")
