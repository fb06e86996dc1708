"""Query a cluster's catalogue for the owners of buckets, and for the instance to write to.

A set of buckets is the text of a PostgreSQL multirange, such as ``{[0,1000),[2000,3000)}``. PostgreSQL does all
arithmetic on these sets.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange.errors import HistoryTrimmed, InvalidArgument
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask


@dataclass(frozen=True)
class Cluster:
    """Connection strings of a cluster's catalogue and of its instances. Both may contain passwords.

    ``instances`` needs no host and port: the catalogue has those of each instance.
    """

    catalogue: str = field(repr=False)
    instances: str = field(repr=False)


OWNED = """
    select case when b.state = 'copied' then coalesce(b.target_replicaset_name, b.current_replicaset_name)
                else b.current_replicaset_name end as replicaset,
           pg_catalog.range_agg(pg_catalog.int8range(b.bucket_id_start, b.bucket_id_end, '[]')) as buckets
    from topology._pico_bucket as b
    where b.tier_name = {tier}
    group by 1
"""
"""The buckets of each replicaset, by the same rule as in the events. A copied range already belongs to its target,
because the target's copy is complete."""

SHARES = """
    with asked as (select {asked}::pg_catalog.int8multirange as buckets), owned as ({owned}), here as (
        select o.replicaset, o.buckets * a.buckets as buckets from owned as o cross join asked as a
        union all
        select null, a.buckets - coalesce((select pg_catalog.range_agg(o.buckets) from owned as o), '{{}}')
        from asked as a)
    select h.replicaset, h.buckets::text, i.name, i.current_state ->> 0, p.address
    from here as h
    left join topology._pico_replicaset as r on r.name = h.replicaset
    left join topology._pico_instance as i on i.name = r.current_master_name
    left join topology._pico_peer_address as p on p.raft_id = i.raft_id and p.connection_type = 'pgproto'
    where not pg_catalog.isempty(h.buckets)
    order by h.replicaset
"""

LOST = """
    with was(replicaset, buckets, master, state, address) as (values {was}), told as (
        select pg_catalog.bool_or(e.event ->> 'map' = 'replicaset') as failed_over,
               pg_catalog.range_agg(pg_catalog.int8range(
                   (e.event -> 'bucket_id' ->> 'start')::int8, (e.event -> 'bucket_id' ->> 'end')::int8, '[]'))
               filter (where e.event ->> 'map' = 'bucket' and e.event ->> 'tier' = {tier}) as buckets
        from topology.events({term}, {index}) as e
    ), kept as (
        select pg_catalog.range_agg(w.buckets::pg_catalog.int8multirange * s.buckets::pg_catalog.int8multirange)
               as buckets
        from was as w join ({shares}) as s(replicaset, buckets, master, state, address)
             using (replicaset, master, state, address)
    )
    select nullif(({asked}::pg_catalog.int8multirange - case
        when n.term = {term} and n.index >= {index} and t.failed_over is not true
        then coalesce(k.buckets, '{{}}') - coalesce(t.buckets, '{{}}')
        else '{{}}' end)::text, '{{}}')
    from topology.now_at() as n cross join told as t cross join kept as k
"""

ALL = """
    with owned as (select pg_catalog.range_agg(o.buckets) as buckets from ({owned}) as o)
    select o.buckets::text,
           nullif((pg_catalog.int8multirange(pg_catalog.range_merge(o.buckets)) - o.buckets)::text, '{{}}')
    from owned as o
    where o.buckets is not null
"""


@dataclass(frozen=True)
class Share:
    """Buckets that one replicaset owns, and its master instance. ``replicaset`` is None for buckets without an owner.

    ``unavailable_because`` is the reason why these buckets cannot be written to now; None if they can be.
    """

    replicaset: str | None
    buckets: str
    master: str | None
    state: str | None
    address: str | None

    @property
    def unavailable_because(self) -> str | None:
        if self.replicaset is None:
            return f"nobody owns the buckets {self.buckets:.200}: topology.assign_buckets() gives them to a replicaset"
        if self.master is None:
            return f"replicaset {self.replicaset} has no master: topology.set_master() gives it one"
        if self.state != "Online":
            return f"{self.master}, the master of replicaset {self.replicaset}, is {self.state}"
        if self.address is None:
            return f"{self.master}, the master of replicaset {self.replicaset}, has no address"
        return None


def at(instances: str, address: str) -> str:
    """Return the connection string of one instance: ``instances`` with the host and port of ``address``."""
    host, _, port = address.rpartition(":")
    settings = {name: value for name, value in conninfo_to_dict(instances).items() if name != "hostaddr"}
    return make_conninfo("", **{**settings, "host": host.strip("[]"), "port": port})


def shares(connection: psycopg.Connection[Any], tier: str, buckets: str) -> list[Share]:
    """Return the owners of ``buckets``: a Share for each replicaset, and one for buckets without an owner."""
    query = sql.SQL(SHARES).format(owned=sql.SQL(OWNED).format(tier=tier), asked=buckets)
    with translated():
        return [Share(*row) for row in connection.execute(query)]


def now(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """Return the term and the index of the catalogue's last event."""
    with translated():
        ((term, index),) = connection.execute("select term, index from topology.now_at()")
    return term, index


def lost(
    connection: psycopg.Connection[Any],
    tier: str,
    buckets: str,
    were: Sequence[Share],
    since: tuple[int, int],
) -> str | None:
    """Return the buckets whose owner may have changed since the position ``since``; None if there are none.

    ``were`` are the owners at that position. All buckets count as changed if a replicaset got another master, or if the
    log no longer reaches back to ``since``. A range that moved away and came back counts too: its owner in between may
    have deleted or written rows.
    """
    term, index = since
    query = sql.SQL(LOST).format(
        term=term,
        index=index,
        tier=tier,
        asked=buckets,
        shares=sql.SQL(SHARES).format(owned=sql.SQL(OWNED).format(tier=tier), asked=buckets),
        was=sql.SQL(", ").join(sql.SQL("({})").format(sql.SQL(", ").join(astuple(share))) for share in were),
    )
    try:
        changed = ask(connection, query)
    except HistoryTrimmed:
        return buckets
    return None if changed is None else str(changed)


def among(numbers: Iterable[int], buckets: str) -> list[int]:
    """Return the numbers that lie in a set of buckets."""
    ends = [int(end) for end in re.findall("[0-9]+", buckets)]
    return [number for number in numbers if bisect_right(ends, number) % 2]


def all_buckets(connection: psycopg.Connection[Any], tier: str) -> str:
    """Return the set of all buckets of a tier.

    Raises InvalidArgument if the tier has no buckets, or if a range between its first and its last bucket has no owner.
    """
    with translated():
        row = connection.execute(sql.SQL(ALL).format(owned=sql.SQL(OWNED).format(tier=tier))).fetchone()
    if row is None:
        raise InvalidArgument(
            f"the catalogue has no buckets of tier {tier!r}: correct the tier, or give them to replicasets with "
            "topology.assign_buckets()"
        )
    buckets, missing = row
    if missing is not None:
        raise InvalidArgument(
            f"nobody owns the buckets {missing:.200} of tier {tier!r}: "
            "topology.assign_buckets() gives them to a replicaset"
        )
    return str(buckets)
