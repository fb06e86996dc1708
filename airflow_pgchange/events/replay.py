"""Deliver past events again, as far as the log still contains them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events.event import event_id
from airflow_pgchange.events.group import held_group
from airflow_pgchange.feeds.argument_checks import Seconds, check_group_name, patience
from airflow_pgchange.feeds.error_translation import translated


def rewind(conninfo: str, group: str, since: datetime, busy_timeout: Seconds | None = 0) -> None:
    """Move a group back, so that it reads all events again that were dispatched to it since a time.

    A group that has not reached that time yet does not move. For groups that handlers or ``read_next_events`` read.
    Raises ConsumerBusy if another process still holds the group's lock after ``busy_timeout``. Raises UnknownConsumer,
    and InvalidArgument for a time without a zone or an invalid group name.
    """
    check_group_name(group)
    with held_group(conninfo, group, patience("busy_timeout", busy_timeout), lambda: False) as reading:
        reading.go_back(event_id(_checked(since), 0))


def replay(
    connection: psycopg.Connection[Any], group: str, subscription_id: str, since: datetime, limit: int
) -> int:
    """Publish the events since a time again, for one subscription that they match. Return how many.

    At most ``limit`` events, in order, all or none. They are new events with the same topic and payload; ``replay_of`` in
    their metadata is the id of the old event. So the role needs ``pgmb.grant_writer`` besides ``pgmb.grant_consumer``.
    Raises UnknownConsumer if the group has no such subscription, and InvalidArgument for a time without a zone or an
    invalid limit.
    """
    query = (
        "insert into pgmb.events (topic, payload, metadata, subscription_id) "
        "select r.topic, r.payload, coalesce(r.metadata, '{}') || jsonb_build_object('replay_of', r.id), %s "
        "from pgmb.replay_events(%s, %s, %s, %s) as r"
    )
    values = [subscription_id, group, subscription_id, event_id(_checked(since), 0), limit]
    with translated():
        return connection.execute(query, values).rowcount


def _checked(since: datetime) -> datetime:
    if since.tzinfo is None:
        raise InvalidArgument(f"since must be a time with a zone, not {since.isoformat()}")
    return since
