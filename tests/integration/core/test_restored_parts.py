"""A dump that was restored in parts: data into existing schemas, or schemas without data. A restored part is recognised
as a copy, with or without other parts."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.admin import manual_operations, schema, upgrades, versions
from airflow_pgchange.errors import SchemaVersionMismatch, SourceRestored
from airflow_pgchange.feeds import CommitFeed, EventFeed, TopologyFeed
from tests import dumps
from tests.batches import drained
from tests.commits import claim_and_fail, commits
from tests.conftest import database
from tests.events import publish, subscribe
from tests.topology import make_catalogue
from tests.tubes import one

pytestmark = pytest.mark.usefixtures("few_sessions")

COMMITS = CommitFeed("here", 0)
DATA = ("--data-only", "--disable-triggers")
"""With triggers, the loaded rows would be captured again."""
ORIGINS = ("revision", "pgmb", "topology", "mbus")


def load(cluster, source, target, *options):
    """Load a part of a dump into another database. Existing objects are left out."""
    dumps.load(cluster, target, dumps.dump(cluster, source, *options), *dumps.ANYWAY)


@pytest.fixture(scope="module")
def installed_once(cluster):
    """The name of a database in which our schemas were installed anew, which tests copy. It has its own origin ids."""
    for made in database(cluster, "template1"):
        with psycopg.connect(made, autocommit=True) as connection:
            schema.install(connection)
        yield conninfo_to_dict(made)["dbname"]


@pytest.fixture
def installed(cluster, installed_once):
    """A database in which our schemas were installed anew."""
    yield from database(cluster, installed_once)


@pytest.fixture
def restore(db, installed, cluster, connect_to):
    """Load a part of a dump of ``db`` into ``installed``, and return a connection to it."""

    def loaded(*options):
        load(cluster, db, installed, *options)
        return connect_to(installed)

    return loaded


@pytest.fixture(scope="module")
def emptied_once(cluster, shared_db):
    """The name of a database into which our schemas were restored without their data."""
    for made in database(cluster, "template1"):
        load(cluster, shared_db, made, "--schema-only")
        yield conninfo_to_dict(made)["dbname"]


@pytest.fixture
def emptied(cluster, emptied_once, connect_to):
    """A connection to such a database."""
    for made in database(cluster, emptied_once):
        yield connect_to(made)


def origins(connection):
    """The schemas on this server that record the database of their origin."""
    return [name for name in ORIGINS if name in versions.present(connection)]


def test_data_that_come_into_installed_schemas_make_a_copy_of_each(restore):
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
        lambda: manual_operations.repair_consumer(connection, connection, COMMITS),
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
    assert manual_operations.repair_consumer(connection, connection, feed) == "exactly once"
    assert drained(feed, installed) == []


def test_a_batch_that_was_in_work_goes_on_after_one_repair(db, connect, installed, restore):
    feed = TopologyFeed("here")
    make_catalogue(connect())
    claimed = claim_and_fail(db, feed=feed, limit=2)
    connection = restore(*DATA)
    assert manual_operations.repair_consumer(connection, connection, feed) == "exactly once"
    changes = drained(feed, installed, limit=2)
    assert len(changes) == len({change.id for change in changes}) > claimed.count


def test_events_that_come_into_an_installed_log_are_dispatched_once(db, connect, installed, restore):
    subscribe(connect(), "g")
    publish(connect(), "a")
    drained(EventFeed("g"), db)
    later = publish(connect(), "b")
    restore(*DATA)
    # The first query gives waiting events ids of this log, and the next query dispatches them.
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
    manual_operations.move_consumer(connection, connection, COMMITS, "beginning")
    assert len(drained(COMMITS, db)) == 8


def test_a_claim_of_another_place_is_not_adopted(db, connect, installed, restore):
    commits(connect(), 5)
    drained(COMMITS, db)
    connection = restore(*DATA, "--table=pgchange.claim", "--table=pubsub.watermark")
    assert one(connection, "select revision.is_native()")
    with pytest.raises(SourceRestored, match="rebase_after_restore"):
        manual_operations.repair_consumer(connection, connection, COMMITS)
    manual_operations.drop_consumer(connection, connection, COMMITS)
    new = commits(connection, 2)
    assert [change.id for change in drained(COMMITS, installed)] == new


def test_a_claim_beyond_the_log_of_a_catalogue_is_not_adopted(db, connect, installed, restore):
    feed = TopologyFeed("here")
    make_catalogue(connect())
    drained(feed, db)
    connection = restore(*DATA, "--table=pgchange.claim", "--table=topology.consumer")
    with pytest.raises(SourceRestored, match="beyond the log.*airflow-pgchange move topology:here"):
        manual_operations.repair_consumer(connection, connection, feed)
    manual_operations.drop_consumer(connection, connection, feed)
    connection.execute("select topology.add_replicaset('r', uuid => 'u')")
    assert len(drained(feed, installed)) == 1


def test_a_dump_whose_transaction_has_the_id_of_the_origin_is_told_from_it(db, bare_db, cluster, connect_to):
    """This happens if two servers began as copies of one cluster: the schemas are installed in one, and restored in
    the other."""
    load(cluster, db, bare_db, "--format=plain")
    connection = connect_to(bare_db)
    for name in origins(connection):
        connection.execute(f"update {name}.origin set written_in = pg_current_xact_id()::xid")
        assert one(connection, f"select written_in = xmin from {name}.origin")
        assert one(connection, f"select {name}.is_native()") is False, name


def test_a_session_that_has_looked_notices_a_copy_that_comes_into_its_database(installed, connect_to):
    connection = connect_to(installed)
    for name in origins(connection):
        looks = f"select {name}.is_native()"
        assert connection.execute(looks, prepare=True).fetchone() == (True,)
        connection.execute(f"insert into {name}.origin default values")
        assert connection.execute(looks, prepare=True).fetchone() == (False,), name


def test_a_session_reads_the_control_file_once_however_often_it_looks(connect):
    with connect().transaction() as here:
        here.connection.execute("set local track_functions = 'pl'")
        for name in origins(here.connection):
            for _ in range(5):
                here.connection.execute(f"select {name}.is_native()")
        read = "select funcname, calls from pg_stat_xact_user_functions where funcname in ('cluster', 'is_native')"
        calls = here.connection.execute(read).fetchall()
        assert [n for name, n in calls if name == "cluster"] == [len(origins(here.connection))]


EMPTY = {
    "revision": "select pubsub.check_origin()",
    "pgmb": "select pgmb.poll_for_events()",
    "topology": "select topology.check_position(null)",
    "mbus": "select mbus.is_native()",
}


def test_schemas_that_came_without_their_data_say_what_to_do(emptied):
    for name in origins(emptied):
        with pytest.raises(psycopg.DatabaseError, match=f"schema {name} came without its data") as refused:
            emptied.execute(EMPTY[name])
        assert "airflow-pgchange install" in refused.value.diag.message_hint


def test_schemas_that_came_without_their_data_are_not_taken_for_installed(emptied):
    for deed in (schema.install, upgrades.upgrade):
        with pytest.raises(SchemaVersionMismatch, match="came without its data.*airflow-pgchange uninstall"):
            deed(emptied)
    schema.uninstall(emptied)
    assert schema.install(emptied)
    commits(emptied, 2)
    assert len(drained(COMMITS, emptied.info.dsn)) == 2
