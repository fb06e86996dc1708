"""Crashes, failovers, restores and upgrades of the servers: nothing is lost, and an error says when a person must
decide."""

from __future__ import annotations

import subprocess

import psycopg
import pytest

from airflow_pgchange.admin import manual_operations, schema
from airflow_pgchange.errors import SourceLostTail, SourceRestored
from demo.postgres import embedded_binaries
from tests import dumps
from tests.chaos import harness
from tests.chaos.harness import FEED, drain, insert, next_xid, processed

RESTORED = pytest.mark.release(
    "every run restores dumps and copies of clusters in test_copies.py and test_restored_parts.py"
)


def test_a_crash_of_the_source_that_reuses_transaction_ids(new_cluster):
    source, results = new_cluster(wal_writer_delay="'10s'"), new_cluster().conninfo()
    harness.prepare_results(results)
    before = insert(source.conninfo(), 5)
    drain(results, source.conninfo())
    # A crash loses no transaction id if PostgreSQL has written the last records of WAL with a full page. So try again.
    for _ in range(10):
        with psycopg.connect(source.conninfo()) as connection:
            for _ in range(200):
                connection.execute("select pg_current_xact_id()")
                connection.rollback()
            seen = next_xid(source.conninfo())
            drain(results, source.conninfo())
            source.kill()
        source.start()
        if next_xid(source.conninfo()) < seen:
            break
    else:
        pytest.fail("no crash forgot a transaction id")
    after = insert(source.conninfo(), 5)
    drain(results, source.conninfo())
    assert processed(results) == before + after


def test_a_claim_is_durable_although_the_sources_commits_need_not_be(new_cluster):
    source, results = new_cluster(wal_writer_delay="'10s'"), new_cluster().conninfo()
    with psycopg.connect(source.conninfo(), autocommit=True) as connection:
        connection.execute("alter database postgres set synchronous_commit = off")
    harness.prepare_results(results)
    before = insert(source.conninfo(), 5)
    drain(results, source.conninfo())
    source.kill()
    source.start()
    after = insert(source.conninfo(), 5)
    drain(results, source.conninfo())
    assert processed(results) == before + after


def test_a_standby_knows_which_transactions_are_open(new_cluster, standby_of):
    # An autovacuum would consume transaction ids between the two queries.
    primary = new_cluster(autovacuum="off")
    standby = standby_of(primary)
    with psycopg.connect(primary.conninfo()) as slow:
        slow.execute("insert into revision.commit default values")
        with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
            connection.execute("begin")
            connection.execute("insert into revision.commit default values")
            connection.execute("prepare transaction 'open'")
            insert(primary.conninfo(), 3)
            expected = connection.execute("select pg_current_snapshot()::text").fetchone()
            standby.wait_for_replay(primary)
            with psycopg.connect(standby.conninfo(), autocommit=True) as there:
                raw = there.execute("select pg_current_snapshot()::text").fetchone()
                assert raw != expected
                assert there.execute("select pubsub.current_snapshot()::text").fetchone() == expected
                xmin = expected[0].split(":")[0]
                beyond = there.execute("select pubsub.current_snapshot(cap => 2)::text").fetchone()
                assert beyond == (f"{xmin}:{xmin}:",)
            connection.execute("rollback prepared 'open'")


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
    with pytest.raises(SourceLostTail, match="airflow-pgchange repair"):
        drain(results, source)
    with psycopg.connect(results, autocommit=True) as one, psycopg.connect(source, autocommit=True) as two:
        assert manual_operations.repair_consumer(one, two, FEED) == "at least once"
    drain(results, source)
    assert processed(results)[: len(kept + lost)] == kept + lost
    assert set(after) <= set(processed(results)[len(kept + lost) :])


def restore(source, target):
    """Restore a database, and before it the roles, because a dump of a database has no roles.

    Roles that exist in both clusters stay as they are.
    """
    command = [source.program("pg_dumpall"), "--roles-only", "-d", source.conninfo()]
    roles = subprocess.run(command, check=True, capture_output=True).stdout
    dumps.load(target, target.conninfo(), roles, *dumps.ANYWAY)
    dumps.load(target, target.conninfo(), dumps.dump(source, source.conninfo()))


@RESTORED
@pytest.mark.parametrize("older_target", [False, True])
def test_a_dump_restored_elsewhere_goes_on_exactly_once(new_cluster, empty_cluster, older_target):
    source = new_cluster()
    harness.prepare_results(source.conninfo())
    with psycopg.connect(source.conninfo()) as slow:
        late = slow.execute("insert into revision.commit default values returning id").fetchone()[0]
        done = insert(source.conninfo(), 5)
        drain(source.conninfo(), source.conninfo())
        slow.commit()
    rest = insert(source.conninfo(), 3)
    target = empty_cluster()
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


@RESTORED
def test_a_restored_source_is_repaired_for_a_consumer_elsewhere(new_cluster, empty_cluster):
    """Takes seconds: a base backup is taken and restored beside its original."""
    source, results = new_cluster(), new_cluster().conninfo()
    harness.prepare_results(results)
    done = insert(source.conninfo(), 5)
    drain(results, source.conninfo())
    rest = insert(source.conninfo(), 3)
    target = empty_cluster()
    restore(source, target)
    with psycopg.connect(target.conninfo(), autocommit=True) as connection:
        connection.execute("select pubsub.rebase_after_restore()")
    with pytest.raises(SourceRestored, match="airflow-pgchange repair"):
        drain(results, target.conninfo())
    with (
        psycopg.connect(results, autocommit=True) as one,
        psycopg.connect(target.conninfo(), autocommit=True) as two,
    ):
        assert manual_operations.repair_consumer(one, two, FEED) == "exactly once"
    drain(results, target.conninfo())
    assert processed(results) == done + rest


def test_a_source_recovered_to_an_earlier_point_is_told_and_repaired(new_cluster):
    results = new_cluster().conninfo()
    archive = "mkdir -p ../archive && cp %p ../archive/%f"
    first = new_cluster(archive_mode="on", archive_command=f"'{archive}'")
    harness.prepare_results(results)
    backup = first.backup()
    try:
        kept = insert(first.conninfo(), 5)
        drain(results, first.conninfo())
        with psycopg.connect(first.conninfo(), autocommit=True) as connection:
            connection.execute("select pg_create_restore_point('before')")
        lost = insert(first.conninfo(), 5)
        drain(results, first.conninfo())
        first.stop()
        backup.recover(first.folder / "archive", "before")
        source = backup.conninfo()
        after = insert(source, 5)
        with pytest.raises(SourceLostTail, match="airflow-pgchange repair"):
            drain(results, source)
        with (
            psycopg.connect(results, autocommit=True) as one,
            psycopg.connect(source, autocommit=True) as two,
        ):
            assert manual_operations.repair_consumer(one, two, FEED) == "at least once"
        drain(results, source)
        assert processed(results)[: len(kept + lost)] == kept + lost
        assert set(after) <= set(processed(results)[len(kept + lost) :])
    finally:
        backup.remove()


@RESTORED
def test_an_upgraded_server_goes_on_exactly_once_once_told_that_its_transaction_ids_were_kept(new_cluster):
    """Takes seconds: pg_upgrade checks, dumps and restores a whole cluster."""
    old = new_cluster()
    harness.prepare_results(old.conninfo())
    with psycopg.connect(old.conninfo()) as slow:
        late = slow.execute("insert into revision.commit default values returning id").fetchone()[0]
        done = insert(old.conninfo(), 5)
        drain(old.conninfo(), old.conninfo())
        slow.commit()
    rest = insert(old.conninfo(), 3)
    with psycopg.connect(old.conninfo(), autocommit=True) as connection:
        # pg_upgrade requires objects that the new server does not have.
        schema.uninstall(connection, ["mbus"])
        connection.execute("drop extension if exists hstore")
    upgraded = old.upgraded(embedded_binaries())
    try:
        source = upgraded.conninfo()
        with pytest.raises(SourceRestored, match="txids_kept => true"):
            drain(source, source)
        with psycopg.connect(source, autocommit=True) as connection:
            connection.execute("select pubsub.rebase_after_restore(txids_kept => true)")
        new = insert(source, 2)
        drain(source, source)
        assert processed(source) == [*done, late, *rest, *new]
    finally:
        upgraded.remove()


def test_a_restored_dump_is_not_taken_for_an_upgrade(new_cluster, empty_cluster):
    source, target = new_cluster(), empty_cluster()
    insert(source.conninfo(), 5)
    restore(source, target)
    with (
        psycopg.connect(target.conninfo(), autocommit=True) as connection,
        pytest.raises(psycopg.Error, match="were not kept"),
    ):
        connection.execute("select pubsub.rebase_after_restore(txids_kept => true)")
