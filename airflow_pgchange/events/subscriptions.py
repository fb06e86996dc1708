"""Who gets which events."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.checks import Seconds, check_group_name, is_sendable, seconds, span
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.queries import ask, select

TOPICAL = "s.params @> jsonb_build_object('topics', jsonb_build_array(e.topic))"
PART_OF = "pgmb.event_partition(coalesce(e.payload ->> (s.params ->> 'by'), e.id), (s.params ->> 'partitions')::integer)"
PARTITIONED = f"{TOPICAL} and {PART_OF} = (s.params ->> 'partition')::integer"

LEAST_EXPIRY = timedelta(minutes=1)
"""Who runs handlers or streams says every few seconds that a subscription is used: a shorter one would go meanwhile."""


@dataclass(frozen=True)
class Selection:
    """Which events a subscription gets.

    ``conditions`` is SQL over ``e``, the event, and ``s``, the subscription, whose ``params`` it may use: the fewer
    different conditions there are, the quicker is dispatching. It runs with the rights of the schema's owner. A
    subscription that nobody uses for ``expiry``, at least a minute, is removed. Raises InvalidArgument for no conditions,
    or another expiry.
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
    """The events of some topics.

    ``partition=(k, n)`` is part ``k`` of ``n``, counted from 0: the n parts together get every event, each once. Events
    are parted by the field ``by`` of their payloads, so that those of one value stay together and in order; an event
    without it, or without ``by``, goes by its id. All conditions of this kind are known to every database. Raises
    InvalidArgument for no topic, and for a part that there is not.
    """
    given = [topics] if isinstance(topics, str) else topics
    if not (
        isinstance(given, Collection)
        and given
        and all(isinstance(name, str) and name and is_sendable(name) for name in given)
    ):
        raise InvalidArgument(f"name at least one topic, not {topics!r:.300}")
    params: dict[str, Any] = {"topics": sorted(set(given))}
    if partition is None:
        if by is not None:
            raise InvalidArgument("by says how events are parted: say which part with partition=(k, n)")
        return Selection(TOPICAL, params, expiry)
    match partition:
        # A bool is an int that nobody counts with.
        case (int() as k, int() as n) if bool not in (type(k), type(n)) and 0 <= k < n < 2**31:
            params |= {"partition": k, "partitions": n}
        case _:
            raise InvalidArgument(
                f"partition is (k, n), with k from 0 to n less one, and not {partition!r:.300}"
            )
    if by is not None:
        if not isinstance(by, str):
            raise InvalidArgument(f"by is the name of a field, not {by!r:.300}")
        params["by"] = by
    return Selection(PARTITIONED, params, expiry)


def subscribe(connection: psycopg.Connection[Any], group: str, selection: Selection | None = None) -> str:
    """Subscribe a group, which is made if it is not there, to events that are dispatched from now on.

    Without a selection it gets all. Returns the subscription's id; the same conditions and params twice are one
    subscription, which has the expiry of the last call. Raises Refused for a condition that PostgreSQL does not take,
    PermissionDenied for a new one that this role may not add, InvalidArgument for an invalid group name.
    """
    query, values = subscribing(group, selection or Selection())
    return str(ask(connection, query, values))


def subscribing(group: str, selection: Selection) -> tuple[LiteralString, list[Any]]:
    """The statement that subscribes a group and returns the subscription's id and since when it is, and its values."""
    check_group_name(group)
    if not isinstance(selection, Selection):
        raise InvalidArgument(
            f"a subscription is by a Selection, or by topical(...), not by {selection!r:.300}"
        )
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
    """End a subscription, and with it what waits for it alone, such as retries. False where it is gone already."""
    with translated():
        query = "delete from pgmb.subscriptions where id = %s"
        return connection.execute(query, [subscription_id]).rowcount == 1


def heartbeat(connection: psycopg.Connection[Any], group: str) -> int:
    """Say that a group's subscriptions are in use, so that they do not expire; returns how many it was time for.

    Call it as often as you like: a row is written when a tenth of its time has passed.
    """
    return int(ask(connection, select("pgmb.keep_alive", group)))


def _check_json(params: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(dict(params), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"params are not JSON: {error}") from error
    # As JSON writes the one character that PostgreSQL has not.
    if not is_sendable(text) or "\\u0000" in text.replace("\\\\", ""):
        raise InvalidArgument(f"params have text that PostgreSQL cannot hold: {params!r:.300}")
