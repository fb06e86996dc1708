"""The view of the event log: its groups with their readers, and its partitions with the number of unread events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from pydantic import BaseModel, Field

from airflow_pgchange.admin import versions
from airflow_pgchange.errors import ConsumerBusy
from airflow_pgchange.feeds.queries import records
from airflow_pgchange.plugins.views import View

PARTITIONS = 50
"""Maximum number of partitions shown, of those that have begun: the current partition and the oldest."""
UPTO = 1000
"""Maximum number of slices read in a partition. It is divided among the groups, with at least one slice for each."""
PATIENCE = "3s"
"""The statement timeout for partitions. The page shows an answer as late after 5 seconds."""
LEFT_OUT = (
    "Partitions are left out: the database did not count in time how much of them each group has not read."
)

GROUPS = """
select g.group_id as name, g.subscriptions, g.topics, g.parts, nullif(g.read_upto, 'infinity') as read_upto, g.moved_at,
       g.reader, a.application_name as application, a.backend_start as connected_at,
       case when a.wait_event_type = 'Lock' then pg_catalog.pg_blocking_pids(g.reader) else '{}' end as waits_for
from pgmb.groups() as g left join pg_catalog.pg_stat_activity as a on a.pid = g.reader
order by g.group_id
"""
SPANS = """
select p.partition::text as name, nullif(p.lower, '-infinity') as begins, nullif(p.upper, 'infinity') as ends, p.state,
       coalesce(pg_catalog.pg_total_relation_size(p.partition), 0) as bytes, pg_catalog.to_jsonb(array(
           select pg_catalog.jsonb_build_object('group', u.group_id, 'events', u.events, 'exact', u.exact)
           from pgmb.unread_by(p.lower, p.upper, %(upto)s) as u)) as unread
from (
    select * from pgmb.spans() where state <> 'ahead' order by state = 'current' desc, lower limit %(most)s
) as p
order by p.lower desc
"""
LOG = """
select d.dispatched_at, d.events, d.waiting, d.oldest_seconds, d.at_work as dispatcher, a.application_name as application,
       d.faults, s.partitions, s.ready_until
from pgmb.dispatching() as d
cross join (
    select pg_catalog.count(*) filter (where state <> 'ahead') as partitions,
           max(upper) filter (where upper < 'infinity') as ready_until
    from pgmb.spans()
) as s
left join pg_catalog.pg_stat_activity as a on a.pid = d.at_work
"""


class Log(BaseModel):
    """Dispatching: the time of the last dispatched event, the events that wait, and the process that dispatches."""

    dispatched_at: datetime
    events: int = Field(description="Number of events that were ever dispatched")
    waiting: int = Field(
        description="Number of events that are not dispatched yet, with future events; up to about a thousand"
    )
    oldest_seconds: float | None
    dispatcher: int | None = Field(description="The process that dispatches now")
    application: str | None
    faults: int = Field(description="Number of events for which a condition failed, up to a thousand")
    partitions: int = Field(description="Number of partitions that have begun, even if not all are shown")
    ready_until: datetime | None = Field(description="Time up to which partitions exist")


class Group(BaseModel):
    """A group of subscriptions, and the process that reads it, as far as the connection's role may see the process."""

    name: str
    subscriptions: int = Field(description="Up to a thousand")
    topics: list[str] = Field(
        description="Topics of some of its subscriptions, for readers of the connection"
    )
    parts: list[str] = Field(
        description="Parts of some of its subscriptions, as in `1 of 4`, for readers of the connection"
    )
    read_upto: datetime | None = Field(description="None: the group reads from the beginning")
    moved_at: datetime
    reader: int | None
    application: str | None
    connected_at: datetime | None
    waits_for: list[int] = Field(description="The processes for whose locks the reader waits")


class Unread(BaseModel):
    """The number of events of a partition that a group has not read."""

    group: str
    events: int
    exact: bool


class Partition(BaseModel):
    """A partition of the log by time. ``begins`` is None for the first partition, ``ends`` for the last."""

    name: str
    begins: datetime | None
    ends: datetime | None
    bytes: int
    state: str = Field(description="current, recent, or past the retention of events that are read")
    unread: list[Unread]


class EventLog(BaseModel):
    """The event log of a database. ``installed`` is None until the database has answered."""

    installed: bool | None = None
    log: Log | None = None
    groups: list[Group] = []
    partitions: list[Partition] = []
    left_out: str | None = Field(
        default=None, description="Reason why partitions are missing from the answer"
    )
    failure: str | None = None


def event_log(connections: Sequence[psycopg.Connection[Any]]) -> EventLog:
    """Return the state of the event log of a database."""
    connection = connections[0]
    if "pgmb" not in versions.present(connection):
        return EventLog(installed=False)
    (log,) = records(connection, LOG)
    groups = [Group(**row) for row in records(connection, GROUPS)]
    answer = EventLog(installed=True, log=Log(**log), groups=groups)
    # Partitions cost most, so they come last. If they time out, the rest of the answer is still shown.
    try:
        answer.partitions = partitions(connection, upto=max(1, UPTO // max(1, len(groups))))
    except (psycopg.errors.QueryCanceled, ConsumerBusy):
        answer.left_out = LEFT_OUT
    return answer


def partitions(connection: psycopg.Connection[Any], upto: int) -> list[Partition]:
    """Return the current partition and the oldest. At most ``upto`` slices of each group are read in each partition."""
    with connection.transaction():
        connection.execute(sql.SQL("set local statement_timeout = {}").format(PATIENCE))
        return [Partition(**row) for row in records(connection, SPANS, {"upto": upto, "most": PARTITIONS})]


def without_topics(answer: EventLog) -> EventLog:
    """Return the log without topics and parts, for users who may not read the connection: topics can reveal content."""
    return answer.model_copy(
        update={"groups": [group.model_copy(update={"topics": [], "parts": []}) for group in answer.groups]}
    )


VIEW = View(event_log, EventLog(), without_topics)
