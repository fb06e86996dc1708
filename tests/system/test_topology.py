"""A real cluster of two replicasets under load: a primary is killed, the DAG promotes its standby, and client, writers,
consumers and a Spark read go on with nothing lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.admin import schema
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.errors import SourceLostTail
from airflow_pgchange.topology import TopologyClient
from demo.postgres import Cluster
from tests.relay_process import relay_process
from tests.replicasets import BUCKETS, NAMES, RULE, Replicasets, replicasets, standbys_of, two_primaries
from tests.spark_session import batch_of, track
from tests.waiting import sleeps, until

Example = Callable[[str], Any]
IDS = range(1, BUCKETS + 1)
LOST = "delete from pgchange.claim"
"""What a new master has not of the batches that the old one gave out."""
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
def cluster_of_two(server: str, db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicasets]:
    """Two primaries whose accounts are tracked, each with a standby that has what was acknowledged, and Airflow's
    connections to them."""
    with two_primaries(server) as primaries:
        for primary in primaries.values():
            with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
                schema.install(connection)
        with standbys_of(primaries, *primaries) as standbys:
            found = replicasets(db, primaries, standbys)
            for name, primary in primaries.items():
                run(primary, SLOW, "select revision.track('account', branch_id => '0')")
                run(
                    primary,
                    "alter system set synchronous_standby_names = '*'",
                    "select pg_reload_conf()",
                )
                while ask(primary.conninfo(), "select max(sync_state) from pg_stat_replication") != "sync":
                    pass
                hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standbys[name].port}"
                connect_airflow(monkeypatch, name, host=hosts, schema="postgres")
            own = conninfo_to_dict(db)
            known = {"host": own["host"], "port": int(own["port"]), "schema": own["dbname"]}
            connect_airflow(monkeypatch, "catalogue", **known)
            connect_airflow(monkeypatch, "warehouse", **known)
            connect_airflow(monkeypatch, "instances", schema="postgres")
            found.put(list(IDS))
            yield found


def connect_airflow(monkeypatch: pytest.MonkeyPatch, name: str, **fields: Any) -> None:
    given = {"conn_type": "postgres", "login": "postgres", **fields}
    monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(given))


class Writer:
    """Writes account after account, each to the master that the client knows, until that has acknowledged it."""

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
        """Return once so many more were acknowledged."""
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
    """The next batch of what the replicaset's consumer has still to process; none when there is nothing."""
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
    """All batches; it ends only when nobody writes any more."""
    return [id for ids in iter(lambda: consume(found, name), []) for id in ids]


def states(run: Any) -> dict[str, str]:
    """How the run and the failover ended, and for each replicaset how the move of its consumers did."""
    tasks = [task for task in run.get_task_instances() if task.task_id != "failed_over"]
    ends = {ti.task_id if ti.map_index < 0 else NAMES[ti.map_index]: str(ti.state) for ti in tasks}
    return {"run": str(run.state), **ends}


def test_a_primary_that_is_killed_under_load_is_replaced_and_nothing_is_lost(
    example: Example, cluster_of_two: Replicasets, db: str
) -> None:
    """Dozens of seconds: a run of a whole DAG by Airflow, with servers that fail over."""
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
                found.run("select topology.set_state('r1-1', 'Offline')")
                failed_over = example("topology_failover").test()
                writer.wait_for_more(50)
        finally:
            if reader.ident is not None:
                reader.join()
            client.stop()
            follower.join()
        master = client.topology.master("default", 0)
    assert states(failed_over) == {
        "run": "success",
        "fail_over": "success",
        "r1": "success",
        "r2": "success",
    }
    assert writer.failures > 0, "the fault did not fire"
    assert master is not None
    assert master.address == f"127.0.0.1:{found.standbys['r1'].port}"
    assert sorted(read) == [(n, 100 * n) for n in IDS]
    there: dict[str, list[int]] = {
        name: ask(server.conninfo(), "select array_agg(id order by id) from account")
        for name, server in (("r1", found.standbys["r1"]), ("r2", found.primaries["r2"]))
    }
    # One row may have been written without an answer.
    assert {*IDS, *writer.acknowledged} <= {*there["r1"], *there["r2"]}
    assert sorted(consumed + drain(found, "r1")) == there["r1"]


def test_consumers_are_moved_though_another_replicaset_cannot_be_helped(
    example: Example, cluster_of_two: Replicasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dozens of seconds: a run of a whole DAG by Airflow, with servers that fail over."""
    found, dag = cluster_of_two, example("topology_failover")
    monkeypatch.setattr(dag.get_task("fail_over"), "retries", 0)
    monkeypatch.setitem(dag.get_task("move_consumers").partial_kwargs, "retries", 0)
    processed = consume(found, "r2")
    run(found.primaries["r2"], LOST)
    with pytest.raises(SourceLostTail):
        consume(found, "r2")
    found.primaries["r1"].kill()
    found.standbys["r1"].stop()
    found.run("select topology.set_state('r1-1', 'Offline')")
    assert states(dag.test()) == {"run": "failed", "fail_over": "failed", "r1": "failed", "r2": "success"}
    assert consume(found, "r2") == processed


@pytest.mark.release(
    "every run has a failover that fails, and shows in its run, beside consumers that are moved"
)
def test_a_failover_that_fails_shows_in_its_run_though_all_consumers_were_moved(
    example: Example, cluster_of_two: Replicasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds: a run of a whole DAG by Airflow, with servers that fail over."""
    dag = example("topology_failover")
    monkeypatch.setattr(dag.get_task("fail_over"), "retries", 0)
    # It still takes writes, so that nothing may be promoted.
    cluster_of_two.run("select topology.set_state('r1-1', 'Offline')")
    assert states(dag.test()) == {"run": "failed", "fail_over": "failed", "r1": "success", "r2": "success"}
