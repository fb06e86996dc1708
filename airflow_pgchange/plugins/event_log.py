"""The event log: what a database tells of its groups and who reads them, of its partitions and who has not read them."""

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
"""So many, of those that have begun, are shown: the current one and the oldest."""
UPTO = 1000
"""So many slices are looked at in a partition, shared among the groups; of each group at least one."""
PATIENCE = "3s"
"""So long may that take; the page calls an answer late that takes longer than 5 seconds."""
LEFT_OUT = (
    "Partitions are left out: the database did not tell in time which groups have not read how much of them."
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
    """Dispatching: when there was something to dispatch last, what waits, and who is at it."""

    dispatched_at: datetime
    events: int = Field(description="All that were ever dispatched")
    waiting: int = Field(description="Not dispatched yet, those of the future too; up to about a thousand")
    oldest_seconds: float | None
    dispatcher: int | None = Field(description="The process that dispatches now")
    application: str | None
    faults: int = Field(description="For so many events a condition failed, up to a thousand")
    partitions: int = Field(description="Those that have begun, also where not all are shown")
    ready_until: datetime | None = Field(description="Up to when partitions are made")


class Group(BaseModel):
    """A group of subscriptions, and the process that reads it, as far as the connection's role may see that."""

    name: str
    subscriptions: int = Field(description="Up to a thousand")
    topics: list[str] = Field(description="That some of them choose, for who may read the connection")
    parts: list[str] = Field(description="Likewise, as in `1 of 4`")
    read_upto: datetime | None = Field(description="None: from the beginning")
    moved_at: datetime
    reader: int | None
    application: str | None
    connected_at: datetime | None
    waits_for: list[int] = Field(description="The processes for whose locks the reader waits")


class Unread(BaseModel):
    """What a group has not read of what was dispatched in the time of a partition."""

    group: str
    events: int
    exact: bool


class Partition(BaseModel):
    """A span of the log's time; ``begins`` is None where it is before all others, ``ends`` where it is behind them."""

    name: str
    begins: datetime | None
    ends: datetime | None
    bytes: int
    state: str = Field(description="current, recent, or older than what is kept of what is read")
    unread: list[Unread]


class EventLog(BaseModel):
    """The event log of a database; ``installed`` is None until that is known."""

    installed: bool | None = None
    log: Log | None = None
    groups: list[Group] = []
    partitions: list[Partition] = []
    left_out: str | None = Field(
        default=None, description="Why partitions are not told of, though the rest is"
    )
    trouble: str | None = None


def event_log(connections: Sequence[psycopg.Connection[Any]]) -> EventLog:
    """What a database tells of its event log."""
    connection = connections[0]
    if "pgmb" not in versions.present(connection):
        return EventLog(installed=False)
    (log,) = records(connection, LOG)
    groups = [Group(**row) for row in records(connection, GROUPS)]
    said = EventLog(installed=True, log=Log(**log), groups=groups)
    # Last, as it costs most: without it the rest is still worth knowing.
    try:
        said.partitions = partitions(connection, upto=max(1, UPTO // max(1, len(groups))))
    except (psycopg.errors.QueryCanceled, ConsumerBusy):
        said.left_out = LEFT_OUT
    return said


def partitions(connection: psycopg.Connection[Any], upto: int) -> list[Partition]:
    """The current partition and the oldest; of each group at most so many slices are looked at in each."""
    with connection.transaction():
        connection.execute(sql.SQL("set local statement_timeout = {}").format(PATIENCE))
        return [Partition(**row) for row in records(connection, SPANS, {"upto": upto, "most": PARTITIONS})]


def without_topics(said: EventLog) -> EventLog:
    """For who may not read the connection: what people subscribe to can say what they do."""
    return said.model_copy(
        update={"groups": [group.model_copy(update={"topics": [], "parts": []}) for group in said.groups]}
    )


VIEW = View(event_log, EventLog(), without_topics)
