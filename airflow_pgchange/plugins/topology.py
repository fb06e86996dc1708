"""The view of a topology: the cluster that a catalogue describes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import psycopg
from pydantic import BaseModel, Field

from airflow_pgchange.admin import versions
from airflow_pgchange.feeds.queries import records
from airflow_pgchange.plugins.views import View

INSTANCES = 1000
"""Maximum numbers of instances and of replicasets shown."""
RANGES = 1000
"""Maximum number of ranges of buckets shown. Adjacent ranges of one owner are merged."""

LOG = """
select n.term, n.index, l.written_at as changed_at
from topology.now_at() as n
left join lateral (
    select o.written_at from topology.log as o order by o.term desc, o.index desc limit 1
) as l on true
"""
REPLICASETS = """
select r.name, r.tier, nullif(r.current_master_name, '') as master,
       case when r.target_master_name <> r.current_master_name then nullif(r.target_master_name, '') end as chosen
from topology._pico_replicaset as r order by r.tier, r.name limit %s
"""
SERVERS = """
select i.name, i.replicaset_name as replicaset, i.tier, i.current_state ->> 0 as state, a.address
from topology._pico_instance as i
left join topology._pico_peer_address as a on a.raft_id = i.raft_id and a.connection_type = 'pgproto'
order by i.tier, i.replicaset_name, i.name limit %s
"""
OWNED = """
with known as (
    select b.tier_name as tier, b.bucket_id_start as first, b.bucket_id_end as last, b.state,
           -- The owner as the protocol reports it to clients.
           case when b.state = 'copied' then coalesce(b.target_replicaset_name, b.current_replicaset_name)
                else b.current_replicaset_name end as replicaset,
           case when b.state in ('copying', 'aborting-copy') then b.target_replicaset_name
                when b.state = 'copied' and b.target_replicaset_name is not null
                then b.current_replicaset_name end as other
    from topology._pico_bucket as b
), placed as (
    select k.*, (k.first - 1, k.state, k.replicaset, k.other) is not distinct from
           lag((k.last, k.state, k.replicaset, k.other)) over (partition by k.tier order by k.first) as goes_on
    from known as k
), numbered as (
    select p.*, pg_catalog.count(*) filter (where not p.goes_on) over (partition by p.tier order by p.first) as run
    from placed as p
)
select n.tier, min(n.first)::text as first, max(n.last)::text as last, n.state, n.replicaset, n.other
from numbered as n
group by n.tier, n.run, n.state, n.replicaset, n.other
order by n.tier, min(n.first)
limit %s
"""


class Log(BaseModel):
    """The end of the catalogue's log."""

    term: int
    index: int
    changed_at: datetime | None = Field(description="Time of the last entry")


class Replicaset(BaseModel):
    """Instances that hold the same data. ``chosen``: the instance that is to replace the current master."""

    name: str
    tier: str
    master: str | None
    chosen: str | None


class Instance(BaseModel):
    """A server of the cluster."""

    name: str
    replicaset: str
    tier: str
    state: str
    address: str | None = Field(description="For readers of the connection")


class Range(BaseModel):
    """Adjacent buckets of one replicaset. ``other``: the replicaset to which they move, or from which they come.

    The numbers are text, because numbers in a browser have too few digits.
    """

    tier: str
    first: str
    last: str
    state: str
    replicaset: str
    other: str | None


class Cluster(BaseModel):
    """The cluster that a catalogue describes. ``installed`` is None until the database has answered."""

    installed: bool | None = None
    log: Log | None = None
    replicasets: list[Replicaset] = []
    instances: list[Instance] = []
    ranges: list[Range] = []
    cut: bool = Field(default=False, description="Some instances, replicasets or ranges are not shown")
    failure: str | None = None


def cluster(connections: Sequence[psycopg.Connection[Any]]) -> Cluster:
    """Return the cluster that the catalogue of a database describes."""
    connection = connections[0]
    if "topology" not in versions.present(connection):
        return Cluster(installed=False)
    (log,) = records(connection, LOG)
    replicasets = records(connection, REPLICASETS, [INSTANCES + 1])
    instances = records(connection, SERVERS, [INSTANCES + 1])
    ranges = records(connection, OWNED, [RANGES + 1])
    return Cluster(
        installed=True,
        log=Log(**log),
        replicasets=[Replicaset(**row) for row in replicasets[:INSTANCES]],
        instances=[Instance(**row) for row in instances[:INSTANCES]],
        ranges=[Range(**row) for row in ranges[:RANGES]],
        cut=max(len(replicasets), len(instances)) > INSTANCES or len(ranges) > RANGES,
    )


def without_addresses(answer: Cluster) -> Cluster:
    """Return the cluster without addresses, for users who may not read the connection."""
    shown = [instance.model_copy(update={"address": None}) for instance in answer.instances]
    return answer.model_copy(update={"instances": shown})


VIEW = View(cluster, Cluster(), without_addresses)
