"""Upgrades from each kept release: the catalog becomes that of a new installation, and all work ends exactly once.

While no release is kept, these tests use the present state as a release.
"""

from __future__ import annotations

import functools
import shutil
from contextlib import contextmanager, suppress

import psycopg
import pytest
from psycopg import sql

from airflow_pgchange.admin import manual_operations, schema, upgrades, versions
from airflow_pgchange.errors import SchemaVersionMismatch
from tests import dumps
from tests.conftest import database
from tests.releases import catalog, finish, kept, routines
from tests.releases.filling.objects import create
from tests.releases.kept import DATABASE
from tests.schemas import possible
from tests.suite import clusters
from tests.suite.clusters import TEMPLATE
from tests.suite.servers import one_of

PRESENT = "present state"
ORIGINS = ["in place", "oldest dump", "newest dump"]
"""Where the work in flight comes from: a database of this cluster, or the dump of the oldest or of this server."""


def pytest_generate_tests(metafunc):
    """A normal run has one of these databases, a release has all."""
    if "origin" in metafunc.fixturenames:
        metafunc.parametrize("origin", one_of(ORIGINS, metafunc))


@pytest.fixture(params=kept.names() or [PRESENT])
def release(request, origin, cluster, tmp_path):
    """A kept release, or the present state, with a dump of this server if the test needs it."""
    if request.param != PRESENT:
        return kept.unpacked(request.param, tmp_path)
    made = kept.Release(tmp_path, (kept.ROOT, kept.FOLDER))
    if origin != "in place":
        kept.write_dump(made, cluster)
    return made


@pytest.fixture
def filled(cluster):
    """An empty database for the work of a release; its connection string. The roles in it are dropped at the end."""
    connection = clusters.maintenance_connection(cluster)
    connection.execute(sql.SQL("create database {} template template1").format(sql.Identifier(DATABASE)))
    yield cluster.conninfo(DATABASE)
    connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(DATABASE)))
    kept.drop_roles(connection)


@pytest.fixture(scope="module")
def created(cluster):
    """A function: the objects of a new installation, with the tables, tubes and queues of a filled database."""

    @functools.cache
    def objects(with_queues):
        with (
            contextmanager(database)(cluster, TEMPLATE) as made,
            psycopg.connect(made, autocommit=True) as connection,
        ):
            create(connection, with_queues)
            return catalog.objects(connection)

    return objects


def upgrade(connection, created):
    """Upgrade a database as an operator does, and compare it with a new installation."""
    with_queues = "mbus" in finish.systems(connection)
    with suppress(SchemaVersionMismatch):
        upgrades.upgrade(connection)
        schema.install(connection)
    found = catalog.differences(catalog.objects(connection), created(with_queues))
    assert not found, "CONTRIBUTING.md says how to write the upgrade file that is due:\n" + "\n".join(found)


def restore(connection, release, name, cluster):
    """Restore a dump by the steps of the guides."""
    dumps.load(cluster, cluster.conninfo("postgres"), release.roles(name), *dumps.ANYWAY)
    dumps.load(cluster, cluster.conninfo(DATABASE), release.script(name))
    connection.execute("select pubsub.rebase_after_restore()")
    connection.execute(
        "select tube.rebase_after_restore(tube) from (select distinct tube from tube.tube_list()) as t"
    )
    connection.execute("select tube.recapture()")
    if "mbus" in finish.systems(connection):
        connection.execute("select mbus.rebase_after_restore()")
    for consumer in finish.consumers(connection):
        if consumer.kind == "topology":
            manual_operations.end_leases(connection, consumer)
            assert manual_operations.repair_consumer(connection, connection, consumer) == "exactly once"


def test_work_in_flight_survives_an_upgrade(release, origin, filled, created, connect_to, cluster):
    """Slow, because sixty consumers of all feeds begin their work, and end it after the upgrade."""
    connection = connect_to(filled)
    if origin == "in place":
        release.run("populate", filled)
    else:
        names = release.dumps(cluster, with_hstore=len(possible(connection)) == len(versions.SYSTEMS))
        restore(connection, release, names[0 if origin == "oldest dump" else -1], cluster)
    upgrade(connection, created)
    finish.finish(connection, filled, is_restored=origin != "in place")
    assert list(finish.wrong(connection)) == []


PLANTED = {
    """create or replace function pgchange.came_along(place text, here text) returns boolean language sql immutable
    as 'select true'""": "different: function pgchange.came_along(text,text)",
    "alter table tube.fault drop column message": "missing: column tube.fault.message",
    "revoke execute on function pgchange_sealed.batches from public": "different: function pgchange_sealed.batches",
    "drop index pgmb.subscriptions_group": "missing: index pgmb.subscriptions_group",
    "create table topology.older ()": "left over: table topology.older",
    "comment on table revision.gap is null": "different: table revision.gap",
    "alter table pubsub.watermark alter column branch_id set default 7": "different: column pubsub.watermark.branch_id",
    "update pgmb.config set value = '1 day' where id = 'partition_interval'": "different: row of pgmb.config",
}
"""Faults in an upgrade, and the line about each."""


def test_each_object_that_an_upgrade_forgets_is_found(connection):
    new = catalog.objects(connection)
    for fault in PLANTED:
        connection.execute(fault)
    found = catalog.differences(catalog.objects(connection), new)
    for line in PLANTED.values():
        assert [text for text in found if text.startswith(line)], (line, found)


MORE = """
create or replace function topology.check_range(from_bucket bigint, to_bucket bigint) returns void language plpgsql as $$
begin
    perform topology.check_one(from_bucket);
end
$$;
drop function topology.check_address(text, bigint);
create function topology.check_address(address text, raft bigint) returns void language sql as 'select';
create function topology.check_one(bucket bigint, other bigint default 1) returns bigint language sql as 'select bucket';
comment on function topology.check_one is 'A new function.';
drop function topology.check_drained(text);
"""
"""A changed function, a changed signature, a new function, and a function less."""


def test_the_written_part_of_an_upgrade_file_brings_all_functions(
    connection, bare_db, connect_to, tmp_path, monkeypatch
):
    (topology,) = [system for system in versions.SYSTEMS if system.folder == "topology"]
    shutil.copytree(versions.sql_folder(), tmp_path / "sql")
    (tmp_path / "sql" / "topology" / "10_more.sql").write_text(MORE)
    monkeypatch.setattr(versions, "sql_folder", lambda: tmp_path / "sql")
    new = connect_to(bare_db)
    schema.install(new, ["topology"])
    connection.execute(routines.script(connection, new, topology))
    assert routines.routines(connection, topology) == routines.routines(new, topology)
    assert routines.script(connection, new, topology) == ""
