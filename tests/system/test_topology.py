"""A failover in a real cluster of two replicasets under load. A primary is killed, and its standby is promoted and
recorded as the master. Client, writers, consumers and a Spark read continue, and nothing is lost."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_pgchange.admin import schema
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.topology import TopologyClient
from demo.postgres import Cluster
from tests.relay_process import relay_process
from tests.replicasets import BUCKETS, RULE, Replicasets, replicasets, standbys_of, two_primaries
from tests.spark_session import batch_of, track
from tests.waiting import sleeps, until

pytestmark = pytest.mark.release(
    "every run kills a primary under a read in test_spark_routing.py, and promotes a standby in test_servers.py"
)
CALLBACK = Path(__file__).parents[2] / "dags" / "patroni" / "set_master.sh"
IDS = range(1, BUCKETS + 1)
SLOW = "create view slow as select id, cents, pg_sleep(0.001)::text as slept from account where id <= 3000"
PATIENCE = 120.0


def ask(server: str, query: str) -> Any:
    with psycopg.connect(server, autocommit=True) as connection:
        row = connection.execute(query).fetchone()
        return None if row is None else row[0]


def run(server: Cluster, *statements: str) -> None:
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def cluster_of_two(server: str, db: str) -> Iterator[Replicasets]:
    """Two primaries with tracked accounts. Each has a standby that has received every acknowledged write."""
    with two_primaries(server) as primaries:
        for primary in primaries.values():
            with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
                schema.install(connection)
        with standbys_of(primaries, *primaries) as standbys:
            found = replicasets(db, primaries, standbys)
            for primary in primaries.values():
                run(primary, SLOW, "select revision.track('account', branch_id => '0')")
                run(
                    primary,
                    "alter system set synchronous_standby_names = '*'",
                    "select pg_reload_conf()",
                )
                while ask(primary.conninfo(), "select max(sync_state) from pg_stat_replication") != "sync":
                    pass
            found.put(list(IDS))
            yield found


class Writer:
    """Writes one account after another to the master that the client knows, until the master has acknowledged the
    write."""

    def __init__(self, client: TopologyClient) -> None:
        self.acknowledged: list[int] = []
        self.failures = 0
        self._client = client
        self._news = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def told(self, events: object) -> None:
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def wait_for_more(self, count: int) -> None:
        """Return when this number of further writes was acknowledged."""
        with self._changed:
            goal = len(self.acknowledged) + count
            if not self._changed.wait_for(lambda: len(self.acknowledged) >= goal, PATIENCE):
                raise TimeoutError(f"no {count} rows were written; {self.failures} attempts failed")

    def _write(self) -> None:
        account = 10_000
        while not self._stopped:
            news = self._news
            if self._put(account):
                with self._changed:
                    self.acknowledged.append(account)
                    self._changed.notify_all()
                account += BUCKETS // 2 + 1  # The other replicaset.
            else:
                self.failures += 1
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._news != news)  # noqa: B023

    def _put(self, account: int) -> bool:
        master = self._client.topology.master("default", account % BUCKETS)
        host, _, port = (master.address if master and master.address else "127.0.0.1:1").rpartition(":")
        try:
            with psycopg.connect(host=host, port=port, user="postgres", dbname="postgres") as connection:
                connection.execute(
                    "insert into account values (%s, %s) on conflict do nothing", [account, 100 * account]
                )
        except psycopg.OperationalError:
            return False
        return True


def consume(found: Replicasets, name: str) -> list[int]:
    """Return the next batch of the replicaset's consumer; None if nothing is ready."""
    ports = f"{found.primaries[name].port},{found.standbys[name].port}"
    source = (
        f"host=127.0.0.1,127.0.0.1 port={ports} user=postgres dbname=postgres target_session_attrs=read-write"
    )
    with ConsumerTransaction(CommitFeed(f"accounts of {name}", 0), found.catalogue, source) as consumer:
        if consumer.claim(100_000) is None:
            return []
        ids = [int(change.id) for change in consumer.changes()]
        consumer.ack()
    return ids


def drain(found: Replicasets, name: str) -> list[int]:
    """Process all batches until nothing is ready. Call it when nobody writes any more."""
    return [id for ids in iter(lambda: consume(found, name), []) for id in ids]


def test_a_primary_that_is_killed_under_load_is_replaced_and_nothing_is_lost(
    cluster_of_two: Replicasets, db: str
) -> None:
    """Takes dozens of seconds: servers are created, and fail over while Spark reads."""
    found, read, consumed = cluster_of_two, list[tuple[int, int]](), list[int]()
    with psycopg.connect(db, autocommit=True) as connection:
        connection.execute("create table movement (id bigint primary key)")
        feed = track(connection, "movement")
        connection.execute("insert into movement select generate_series(1, 3000)")

    def spark() -> None:
        with batch_of(feed, db, cluster=found.reached) as job:
            rows = job.routed("public.slow", "id", RULE, columns=["cents"]).collect()
            read.extend((row["id"], row["cents"]) for row in rows)

    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        writer, reader = Writer(client), threading.Thread(target=spark)
        follower = threading.Thread(target=client.follow, args=[writer.told])
        follower.start()
        try:
            with writer:
                writer.wait_for_more(10)
                consumed += consume(found, "r1")
                reader.start()
                with psycopg.connect(found.primaries["r1"].conninfo(), autocommit=True) as watching:
                    until(watching, sleeps(), patience=60)
                found.primaries["r1"].kill()
                found.standbys["r1"].promote()
                call = [CALLBACK, found.catalogue, "r1-2", "on_role_change", "primary", "r1"]
                subprocess.run(call, check=True, timeout=PATIENCE)
                writer.wait_for_more(50)
        finally:
            if reader.ident is not None:
                reader.join()
            client.stop()
            follower.join()
        master = client.topology.master("default", 0)
    assert writer.failures > 0, "the fault did not fire"
    assert master is not None
    assert master.address == f"127.0.0.1:{found.standbys['r1'].port}"
    assert sorted(read) == [(n, 100 * n) for n in IDS]
    there: dict[str, list[int]] = {
        name: ask(server.conninfo(), "select array_agg(id order by id) from account")
        for name, server in (("r1", found.standbys["r1"]), ("r2", found.primaries["r2"]))
    }
    # For one row the acknowledgement may have been lost with the primary.
    assert {*IDS, *writer.acknowledged} <= {*there["r1"], *there["r2"]}
    assert sorted(consumed + drain(found, "r1")) == there["r1"]
