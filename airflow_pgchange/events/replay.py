"""Giving again what was published already, as far as the log still has it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events.event import event_id
from airflow_pgchange.events.group import held_group
from airflow_pgchange.feeds.checks import Seconds, check_group_name, patience
from airflow_pgchange.feeds.errors import translated


def rewind(conninfo: str, group: str, since: datetime, busy_timeout: Seconds | None = 0) -> None:
    """Let a group read again all that was dispatched to it since a time; one that has not come so far stays where it is.

    For groups that are read by handlers or by ``read_next_events``. Raises ConsumerBusy while somebody holds the group
    for longer than ``busy_timeout``, UnknownConsumer, InvalidArgument for a time without a zone and for an invalid
    group name.
    """
    check_group_name(group)
    with held_group(conninfo, group, patience("busy_timeout", busy_timeout), lambda: False) as reading:
        reading.go_back(event_id(_checked(since), 0))


def replay(
    connection: psycopg.Connection[Any], group: str, subscription_id: str, since: datetime, limit: int
) -> int:
    """Publish the events since a time that fit a subscription once more, for it alone; returns how many.

    In their order, at most ``limit``, all or none. They are new events: of the same topic and payload, and with the
    id of the old one as ``replay_of`` in their metadata. So the role needs ``pgmb.grant_writer`` beside
    ``pgmb.grant_consumer``. Raises UnknownConsumer where the group has no such subscription, InvalidArgument for a time
    without a zone or no number of events.
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
