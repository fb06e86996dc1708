"""Real clusters as replicasets, with a table whose rows are spread over them by buckets, and the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_pgchange.topology.bucket_owners import Cluster as Reached
from demo.postgres import Cluster
from tests.suite.clusters import new_cluster

NAMES = ("r1", "r2")
BUCKETS = 3000
RULE = f"id % {BUCKETS}"
TABLE = "create table account (id bigint primary key, cents bigint not null)"


@dataclass(frozen=True)
class Replicasets:
    """Two replicasets. r1 owns the first half of the buckets, r2 the second half.

    The instances of r1 are r1-1 and its standby r1-2.
    """

    catalogue: str
    primaries: dict[str, Cluster]
    standbys: dict[str, Cluster]

    @property
    def reached(self) -> Reached:
        """The connections that Spark gets.

        They do not name the instances: Spark learns their addresses from the catalogue.
        """
        return Reached(self.catalogue, "dbname=postgres user=postgres")

    def run(self, query: str, *arguments: Any) -> None:
        """Run a statement in the catalogue."""
        with psycopg.connect(self.catalogue, autocommit=True) as connection:
            connection.execute(query, arguments)

    def put(self, ids: list[int]) -> None:
        """Insert rows, each into the replicaset that owns its bucket at first."""
        for number, primary in enumerate(self.primaries.values()):
            mine = [one for one in ids if one % BUCKETS * 2 // BUCKETS == number]
            with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
                connection.execute(
                    "insert into account select id, 100 * id from unnest(%s::bigint[]) id", [mine]
                )

    def fail_over(self, name: str) -> None:
        """Promote the standby of an instance that has died, and record it in the catalogue, as an operator would."""
        self.standbys[name].promote()
        self.run("select topology.set_state(%s, 'Offline')", f"{name}-1")
        self.run("select topology.set_master(%s, %s)", name, f"{name}-2")


@contextmanager
def standbys_of(primaries: dict[str, Cluster], *names: str) -> Iterator[dict[str, Cluster]]:
    """Start a streaming standby for each of these primaries, and remove them at the end."""
    with ExitStack() as made:
        found = {}
        for name in names:
            found[name] = primaries[name].standby()
            made.callback(found[name].remove)
        yield found


@contextmanager
def two_primaries(server: str) -> Iterator[dict[str, Cluster]]:
    """Two clusters, removed at the end."""
    with ExitStack() as made:
        found = {}
        for number, name in enumerate(NAMES, 1):
            found[name] = new_cluster(server, family=number)
            made.callback(found[name].remove)
        yield found


def replicasets(catalogue: str, primaries: dict[str, Cluster], standbys: dict[str, Cluster]) -> Replicasets:
    """Yield the catalogue with the cluster's description. Each primary has an empty table."""
    found = Replicasets(catalogue, primaries, standbys)
    half = BUCKETS // 2
    for number, name in enumerate(NAMES):
        with psycopg.connect(primaries[name].conninfo(), autocommit=True) as connection:
            connection.execute(f"drop table if exists account cascade; {TABLE}")
        found.run("select topology.add_replicaset(%s)", name)
        for place, servers in enumerate((primaries, standbys), 1):
            if name in servers:
                address = f"127.0.0.1:{servers[name].port}"
                found.run("select topology.add_instance(%s, %s, %s)", f"{name}-{place}", name, address)
        found.run("select topology.set_master(%s, %s)", name, f"{name}-1")
        first, last = number * half, (number + 1) * half - 1
        found.run("select topology.assign_buckets('default', %s, %s, %s)", first, last, name)
    return found
