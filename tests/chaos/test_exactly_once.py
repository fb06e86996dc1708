"""Nothing lost and nothing twice, whatever writers, consumers and servers do."""

from __future__ import annotations

import subprocess
import threading
import time

import psycopg
import pytest

from airflow_pgchange import schema
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, consumers
from airflow_pgchange.feeds.errors import SourceLostTail, SourceRestored
from demo.postgres import Cluster, system_binaries
from tests.chaos import harness
from tests.chaos.harness import Campaign, consume_once, judge

FEED = CommitFeed("chaos")


@pytest.fixture
def new_cluster():
    made = []

    def make(**settings):
        cluster = Cluster.create(system_binaries(), settings)
        made.append(cluster)
        with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
            schema.install(connection)
        return cluster

    yield make
    for cluster in made:
        cluster.remove()


@pytest.fixture
def standby_of():
    made = []

    def make(primary, **settings):
        standby = primary.standby(settings)
        made.append(standby)
        return standby

    yield make
    for standby in made:
        standby.remove()


def assert_exactly_once(done, results, source, in_order=False):
    assert done.errors == []
    assert done.failed > 0
    verdict = judge(results, source)
    assert verdict.written > 0
    assert (verdict.lost, verdict.doubled) == (0, 0)
    if in_order:
        assert verdict.in_order


@pytest.mark.parametrize("in_order", [False, True])
def test_results_beside_the_commits(new_cluster, in_order):
    source = new_cluster().conninfo()
    done = harness.run(CommitFeed("chaos", in_order=in_order), source, [source], Campaign())
    assert_exactly_once(done, source, source, in_order)


@pytest.mark.parametrize("in_order", [False, True])
def test_results_in_another_cluster(new_cluster, in_order):
    source, results = new_cluster().conninfo(), new_cluster().conninfo()
    done = harness.run(CommitFeed("chaos", in_order=in_order), results, [source], Campaign())
    assert_exactly_once(done, results, source, in_order)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_lagging_standby_alternating_with_its_primary(new_cluster, standby_of, in_order):
    primary = new_cluster()
    standby = standby_of(primary, recovery_min_apply_delay="'120ms'")
    source = primary.conninfo()
    with psycopg.connect(source) as slow:
        slow.execute("insert into revision.commit default values")
        finish = threading.Timer(2, slow.commit)
        finish.start()
        sources = [source, f"{standby.conninfo()} target_session_attrs=any"]
        hosts = f"host=127.0.0.1,127.0.0.1 port={standby.port},{primary.port} dbname=postgres user=postgres"
        done = harness.run(
            CommitFeed("chaos", in_order=in_order), source, [sources[0], hosts], Campaign(writers=8)
        )
        finish.join()
    while consume_once(CommitFeed("chaos", in_order=in_order), source, source, 1000):
        pass
    assert_exactly_once(done, source, source, in_order)


def test_the_harness_catches_a_cursor_over_ids(new_cluster):
    source = new_cluster().conninfo()

    def read(connection, state):
        rows = connection.execute(
            "select id, commit_id from revision.commit_queue where id > %s order by id limit 1000",
            [state or 0],
        ).fetchall()
        return [row[1] for row in rows], rows[-1][0] if rows else state

    run_naive(source, [source], read)
    assert judge(source, source).lost > 0


def test_the_harness_catches_a_stored_raw_snapshot(new_cluster, standby_of):
    primary = new_cluster()
    standby = standby_of(primary)
    source = primary.conninfo()

    def read(connection, state):
        row = connection.execute(
            "select pg_current_snapshot()::text, array(select commit_id from revision.commit_queue "
            "where not pg_visible_in_snapshot(txid, %s::pg_snapshot) "
            "and pg_visible_in_snapshot(txid, pg_current_snapshot()))",
            [state or "1:1:"],
        ).fetchone()
        return row[1], row[0]

    run_naive(source, [source, standby.conninfo()], read)
    assert judge(source, source).lost > 0


def run_naive(source, servers, read):
    """A consumer as many would write it, under the same writers; it drains at the end as ours does."""
    harness.prepare_results(source)
    campaign = Campaign(writers=8)
    deadline = time.monotonic() + campaign.seconds
    writing = [
        threading.Thread(target=harness.write, args=(source, campaign, n, deadline))
        for n in range(campaign.writers)
    ]
    for thread in writing:
        thread.start()
    state, turn = None, 0
    with psycopg.connect(source, autocommit=True) as results:
        readers = [psycopg.connect(server, autocommit=True) for server in servers]
        finished = False
        while True:
            ids, state = read(readers[turn % len(readers)], state)
            results.execute("insert into processed (commit_id) select unnest(%s::bigint[])", [ids])
            if finished and not ids:
                break
            finished = not any(thread.is_alive() for thread in writing)
            turn += 1
        for reader in readers:
            reader.close()


def drain(results, source):
    while consume_once(FEED, results, source, 1000):
        pass


def insert(source, n):
    with psycopg.connect(source, autocommit=True) as connection:
        rows = [
            connection.execute("insert into revision.commit default values returning id").fetchone()
            for _ in range(n)
        ]
    return [row[0] for row in rows]


def next_xid(source):
    with psycopg.connect(source, autocommit=True) as connection:
        return connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()[
            0
        ]


def processed(results):
    with psycopg.connect(results) as connection:
        return [row[0] for row in connection.execute("select commit_id from processed order by n").fetchall()]


def test_a_crash_of_the_source_that_reuses_transaction_ids(new_cluster):
    source, results = new_cluster(), new_cluster().conninfo()
    harness.prepare_results(results)
    before = insert(source.conninfo(), 5)
    drain(results, source.conninfo())
    with psycopg.connect(source.conninfo()) as connection:
        for _ in range(200):
            connection.execute("select pg_current_xact_id()")
            connection.rollback()
        seen = next_xid(source.conninfo())
        drain(results, source.conninfo())
        source.kill()
    source.start()
    assert next_xid(source.conninfo()) < seen
    after = insert(source.conninfo(), 5)
    drain(results, source.conninfo())
    assert processed(results) == before + after


def test_a_promotion_that_lost_the_tail_is_told_and_repaired(new_cluster, standby_of):
    primary, results = new_cluster(), new_cluster().conninfo()
    harness.prepare_results(results)
    standby = standby_of(primary)
    kept = insert(primary.conninfo(), 5)
    drain(results, primary.conninfo())
    standby.wait_for_replay(primary)
    standby.stop()
    lost = insert(primary.conninfo(), 5)
    drain(results, primary.conninfo())
    primary.kill()
    standby.start()
    standby.promote()
    source = standby.conninfo()
    after = insert(source, 5)
    with pytest.raises(SourceLostTail, match="airflow pgchange repair"):
        drain(results, source)
    with psycopg.connect(results, autocommit=True) as one, psycopg.connect(source, autocommit=True) as two:
        assert consumers.repair(one, two, FEED) == "at least once"
    drain(results, source)
    assert processed(results)[: len(kept + lost)] == kept + lost
    assert set(after) <= set(processed(results)[len(kept + lost) :])


def restore(source, target):
    dumped = subprocess.run(
        [source.binaries / "pg_dump", "-d", source.conninfo()], check=True, capture_output=True
    ).stdout
    subprocess.run(
        [source.binaries / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", target.conninfo()],
        input=dumped,
        check=True,
        capture_output=True,
    )


@pytest.mark.parametrize("older_target", [False, True])
def test_a_dump_restored_elsewhere_goes_on_exactly_once(new_cluster, older_target):
    source = new_cluster()
    harness.prepare_results(source.conninfo())
    with psycopg.connect(source.conninfo()) as slow:
        late = slow.execute("insert into revision.commit default values returning id").fetchone()[0]
        done = insert(source.conninfo(), 5)
        drain(source.conninfo(), source.conninfo())
        slow.commit()
    rest = insert(source.conninfo(), 3)
    target = Cluster.create(system_binaries())
    try:
        with psycopg.connect(target.conninfo(), autocommit=True) as connection:
            for _ in range(3000 if older_target else 0):
                connection.execute("select pg_current_xact_id()")
        restore(source, target)
        with pytest.raises(SourceRestored, match="rebase_after_restore"):
            drain(target.conninfo(), target.conninfo())
        new = insert(target.conninfo(), 2)
        with psycopg.connect(target.conninfo(), autocommit=True) as connection:
            connection.execute("select pubsub.rebase_after_restore()")
        drain(target.conninfo(), target.conninfo())
        assert processed(target.conninfo()) == [*done, late, *rest, *new]
        newer = insert(target.conninfo(), 2)
        drain(target.conninfo(), target.conninfo())
        assert processed(target.conninfo())[-2:] == newer
    finally:
        target.remove()


def test_a_restored_source_is_repaired_for_a_consumer_elsewhere(new_cluster):
    source, results = new_cluster(), new_cluster().conninfo()
    harness.prepare_results(results)
    done = insert(source.conninfo(), 5)
    drain(results, source.conninfo())
    rest = insert(source.conninfo(), 3)
    target = Cluster.create(system_binaries())
    try:
        restore(source, target)
        with psycopg.connect(target.conninfo(), autocommit=True) as connection:
            connection.execute("select pubsub.rebase_after_restore()")
        with pytest.raises(SourceRestored, match="airflow pgchange repair"):
            drain(results, target.conninfo())
        with (
            psycopg.connect(results, autocommit=True) as one,
            psycopg.connect(target.conninfo(), autocommit=True) as two,
        ):
            assert consumers.repair(one, two, FEED) == "exactly once"
        drain(results, target.conninfo())
        assert processed(results) == done + rest
    finally:
        target.remove()


def test_a_consumer_killed_between_claim_and_ack_leaves_nothing_half_done(new_cluster):
    source = new_cluster()
    harness.prepare_results(source.conninfo())
    expected = insert(source.conninfo(), 5)
    with (
        pytest.raises(Exception, match="terminat|closed|lost|consum"),
        ConsumerTransaction(FEED, source.conninfo()) as tx,
    ):
        tx.claim(10)
        with psycopg.connect(source.conninfo(), autocommit=True) as connection:
            ended = connection.execute(
                "select pg_terminate_backend(%s)", [tx.connection.info.backend_pid]
            ).fetchone()
        assert ended == (True,)
        tx.ack()
    drain(source.conninfo(), source.conninfo())
    assert processed(source.conninfo()) == expected
