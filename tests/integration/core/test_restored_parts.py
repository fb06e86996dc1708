"""A dump that was restored in parts: its data into schemas that are there, its schemas without the data. What came is
told as a copy, whatever came with it."""

from __future__ import annotations

import subprocess

import psycopg
import pytest

from airflow_pgchange.admin import schema, versions
from airflow_pgchange.feeds import CommitFeed, EventFeed, TopologyFeed, by_hand
from airflow_pgchange.feeds.errors import SchemaVersionMismatch, SourceRestored
from tests.batches import drained
from tests.commits import commits
from tests.events import publish, subscribe
from tests.topology import make_catalogue
from tests.tubes import one

COMMITS = CommitFeed("here", 0)
DATA = ("--data-only", "--disable-triggers")
"""With triggers, what is loaded would be captured again."""
ORIGINS = ("revision", "pgmb", "topology", "mbus")


@pytest.fixture
def restore(db, bare_db, cluster, connect_to):
    """Load a part of a dump of ``db`` into ``bare_db``; a connection to it. What is there already is left out."""

    def load(part, *options):
        dump = [cluster.binaries / "pg_dump", part, *options, "-d", db]
        data = subprocess.run(dump, check=True, capture_output=True).stdout
        psql = [cluster.binaries / "psql", "-X", "-q", "-d", bare_db]
        subprocess.run(psql, input=data, check=True, capture_output=True)
        return connect_to(bare_db)

    return load


@pytest.fixture
def installed(bare_db, connect_to):
    """A database in which our schemas were installed by themselves."""
    schema.install(connect_to(bare_db))
    return bare_db


def origins(connection):
    """The schemas that keep an origin on this server."""
    return [name for name in ORIGINS if name in versions.present(connection)]


def test_data_that_come_into_installed_schemas_make_a_copy_of_each(db, installed, restore):
    connection = restore(*DATA)
    for name in origins(connection):
        assert one(connection, f"select {name}.is_native()") is False, name
        assert one(connection, f"select count(*) from {name}.origin") == 2
        connection.execute(f"select pgchange.note_origin('{name}.origin')")
        assert one(connection, f"select {name}.is_native()") is True, name


def test_commits_that_come_into_an_installed_queue_go_on_exactly_once(db, connect, installed, restore):
    commits(connect(), 5)
    drained(COMMITS, db)
    commits(connect(), 3)
    connection = restore(*DATA, "--load-via-partition-root")
    for deed in (
        lambda: drained(COMMITS, installed),
        lambda: by_hand.repair(connection, connection, COMMITS),
    ):
        with pytest.raises(SourceRestored, match="rebase_after_restore"):
            deed()
    connection.execute("select pubsub.rebase_after_restore()")
    assert len(drained(COMMITS, installed)) == 3
    assert one(connection, "select count(*) from revision.origin") == 1


def test_a_catalogue_that_comes_into_an_installed_one_is_repaired(db, connect, installed, restore):
    feed = TopologyFeed("here")
    make_catalogue(connect())
    drained(feed, db)
    connection = restore(*DATA)
    with pytest.raises(SourceRestored, match="another database"):
        drained(feed, installed)
    assert by_hand.repair(connection, connection, feed) == "exactly once"
    assert drained(feed, installed) == []


def test_events_that_come_into_an_installed_log_are_dispatched_once(db, connect, installed, restore):
    subscribe(connect(), "g")
    publish(connect(), "a")
    drained(EventFeed("g"), db)
    later = publish(connect(), "b")
    restore(*DATA)
    # The first look gives what waits there ids of this log, and the next one dispatches it.
    assert drained(EventFeed("g"), installed) == []
    assert [change.id for change in drained(EventFeed("g"), installed)] == later


@pytest.mark.parametrize(
    "come_along",
    [
        "update pubsub.watermark set snapshot = '900000000:900000000:'",
        """update pgchange.claim set upto = '{"snapshot": "900000000:900000000:", "partial": null}'""",
    ],
    ids=["watermark", "claim"],
)
def test_progress_beyond_the_transactions_of_the_cluster_is_not_believed(db, connect, come_along):
    connection = connect()
    commits(connection, 5)
    drained(COMMITS, db)
    connection.execute(come_along)
    commits(connection, 3)
    with pytest.raises(SourceRestored, match="rebase_after_restore"):
        drained(COMMITS, db)
    by_hand.move(connection, connection, COMMITS, "beginning")
    assert len(drained(COMMITS, db)) == 8


def test_a_claim_of_another_place_is_not_adopted(db, connect, installed, restore):
    commits(connect(), 5)
    drained(COMMITS, db)
    connection = restore(*DATA, "--table=pgchange.claim", "--table=pubsub.watermark")
    assert one(connection, "select revision.is_native()")
    with pytest.raises(SourceRestored, match="rebase_after_restore"):
        by_hand.repair(connection, connection, COMMITS)
    by_hand.drop(connection, connection, COMMITS)
    new = commits(connection, 2)
    assert [change.id for change in drained(COMMITS, installed)] == new


def test_a_claim_beyond_the_log_of_a_catalogue_is_not_adopted(db, connect, installed, restore):
    feed = TopologyFeed("here")
    make_catalogue(connect())
    drained(feed, db)
    connection = restore(*DATA, "--table=pgchange.claim", "--table=topology.consumer")
    with pytest.raises(SourceRestored, match="beyond the log.*airflow pgchange move topology:here"):
        by_hand.repair(connection, connection, feed)
    by_hand.drop(connection, connection, feed)
    connection.execute("select topology.add_replicaset('r', uuid => 'u')")
    assert len(drained(feed, installed)) == 1


def test_a_dump_whose_transaction_has_the_id_of_the_origin_is_told_from_it(db, restore):
    """As in two servers that began as copies of one, and of which one was installed and the other restored."""
    connection = restore("--format=plain")
    for name in origins(connection):
        connection.execute(f"update {name}.origin set written_in = pg_current_xact_id()::xid")
        assert one(connection, f"select written_in = xmin from {name}.origin")
        assert one(connection, f"select {name}.is_native()") is False, name


EMPTY = {
    "revision": "select pubsub.check_origin()",
    "pgmb": "select pgmb.poll_for_events()",
    "topology": "select topology.check_position(null)",
    "mbus": "select mbus.is_native()",
}


def test_schemas_that_came_without_their_data_say_what_to_do(db, restore):
    connection = restore("--schema-only")
    for name in origins(connection):
        with pytest.raises(psycopg.DatabaseError, match=f"schema {name} came without its data") as refused:
            connection.execute(EMPTY[name])
        assert "airflow pgchange install" in refused.value.diag.message_hint


def test_schemas_that_came_without_their_data_are_not_taken_for_installed(db, restore):
    connection = restore("--schema-only")
    for deed in (schema.install, schema.upgrade):
        with pytest.raises(SchemaVersionMismatch, match="came without its data.*airflow pgchange uninstall"):
            deed(connection)
    schema.uninstall(connection)
    assert schema.install(connection)
    commits(connection, 2)
    assert len(drained(COMMITS, connection.info.dsn)) == 2
