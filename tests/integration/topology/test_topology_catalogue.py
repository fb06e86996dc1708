"""The relay while its catalogue is unreachable, replaced or missing. Afterwards clients have the correct state again."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin import schema
from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.topology import TopologyClient
from airflow_pgchange.topology.catalogue import Catalogue
from demo.postgres import free_port
from tests.pooler import pooler
from tests.relay_process import RelayProcess, relay_process
from tests.topology import make_catalogue
from tests.waiting import until

NEW_TERM = "restarted, restored or failed over"


def test_a_connection_to_the_catalogue_that_is_lost_loses_nothing(db, catalogue):
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        killed = catalogue.execute(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        ).fetchone()
        assert killed[0] >= 1
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        relay.wait_for("back, in the same term")
        (event,) = client.receive(30)
        assert event.current_state == "Offline"


ALONE = """
    select count(*) = 0 from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'
"""


@contextmanager
def asleep(relay, database):
    """Stop the relay's process for the block, at a moment when no query of the relay is running."""
    os.kill(relay.pid, signal.SIGSTOP)
    try:
        with psycopg.connect(database, autocommit=True) as connection:
            until(connection, ALONE)
        yield
    finally:
        os.kill(relay.pid, signal.SIGCONT)


def test_who_would_miss_events_that_were_trimmed_before_the_relay_read_them_begins_anew(db, catalogue):
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        with catalogue.transaction():
            catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
            catalogue.execute("update topology.log set written_at = now() - interval '1 second'")
            (trimmed,) = catalogue.execute("select topology.trim_log('0')").fetchone()
        assert trimmed is not None
        with pytest.raises(ServerUnavailable, match="were trimmed before the relay had read them"):
            client.receive(30)
        client.connect()
        assert client.topology.instances["uuid-r1-i2"].state == "Offline"
        catalogue.execute("select topology.set_state('r1-i2', 'Online')")
        (event,) = client.receive(30)
        assert event.current_state == "Online"


def test_a_relay_waits_for_a_catalogue_that_is_not_there_yet(own_cluster):
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        schema.install(connection)
        make_catalogue(connection)
    own_cluster.stop()
    relay = RelayProcess(own_cluster.conninfo(), free_port(), {"limits": {"startup_timeout": 2}})
    try:
        relay.wait_for("the catalogue is lost")
        with pytest.raises(ServerUnavailable, match="the catalogue cannot be reached now"):
            TopologyClient(relay.conninfo()).connect()
        own_cluster.start()
        relay.wait_for("in term")
        with TopologyClient(relay.conninfo()) as client:
            assert len(client.topology.instances) == 4
    finally:
        relay.kill()


def test_a_relay_reads_times_in_whatever_style_the_catalogue_shows_them(db, catalogue):
    catalogue.execute(f"alter database \"{catalogue.info.dbname}\" set datestyle = 'SQL, DMY'")
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        assert client.topology.owner("default", 0) == "uuid-r1"


def test_a_database_without_a_catalogue_is_an_error_that_says_so(bare_db):
    relay = RelayProcess(bare_db, free_port(), {})
    assert relay.stop(0) != 0
    assert "airflow-pgchange install" in relay.wait_for("SchemaMissing")


def test_a_role_that_may_not_read_the_catalogue_is_an_error_that_says_what_it_needs(catalogue, role):
    nobody = role("nobody")
    relay = RelayProcess(nobody.conninfo, free_port(), {})
    assert relay.stop(0) != 0
    assert f"topology.grant_reader('{nobody.name}')" in relay.wait_for("let the owner")


async def test_a_catalogue_that_does_not_answer_counts_as_lost(db, catalogue, monkeypatch):
    monkeypatch.setattr("airflow_pgchange.topology.catalogue.PATIENCE", 0.5)
    asked = Catalogue(db)
    await asked.connect()
    try:
        with catalogue.transaction():
            catalogue.execute("lock table topology.log")
            with pytest.raises(ServerUnavailable, match=r"did not answer within 0\.5 s"):
                await asked.now()
    finally:
        await asked.close()


def test_a_catalogue_that_restarted_begins_a_new_term_with_a_new_snapshot(own_database, own_cluster):
    with psycopg.connect(own_database, autocommit=True) as connection:
        make_catalogue(connection)
    with relay_process(own_database) as relay, TopologyClient(relay.conninfo()) as client:
        own_cluster.restart()
        with pytest.raises(ServerUnavailable, match=NEW_TERM):
            client.receive(30)
        client.connect()
        assert (client.topology.at.term, len(client.topology.instances)) == (2, 4)


def test_whoever_begins_a_term_and_does_not_commit_keeps_nobody_from_what_is_committed(
    own_database, own_cluster
):
    with psycopg.connect(own_database, autocommit=True) as connection:
        make_catalogue(connection)
    with relay_process(own_database) as relay, TopologyClient(relay.conninfo()) as client:
        with asleep(relay, own_database):
            own_cluster.restart()
            writer = psycopg.connect(own_database)
            writer.execute("select topology.set_state('r1-i2', 'Offline')")
        with writer:
            with pytest.raises(ServerUnavailable, match=NEW_TERM):
                client.receive(30)
            client.connect()
            assert client.topology.instances["uuid-r1-i2"].state == "Online"
            writer.commit()
            (event,) = client.receive(30)
            assert (event.raft.term, client.topology.instances["uuid-r1-i2"].state) == (2, "Offline")


def test_a_server_that_was_replaced_behind_a_pooler_is_noticed_though_nothing_has_happened(
    own_database, own_cluster
):
    with psycopg.connect(own_database, autocommit=True) as connection:
        make_catalogue(connection)
    with (
        pooler(own_database) as pooled,
        relay_process(pooled) as relay,
        TopologyClient(relay.conninfo()) as client,
    ):
        with asleep(relay, own_database):
            own_cluster.restart()
        with pytest.raises(ServerUnavailable, match=NEW_TERM):
            client.receive(30)
        relay.wait_for("another catalogue than before answers")
        client.connect()
        assert (client.topology.at.term, len(client.topology.instances)) == (2, 4)


def test_a_catalogue_that_was_restored_in_its_term_is_told_anew(db, catalogue):
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        schema.uninstall(catalogue, ["topology"])
        relay.wait_for("the catalogue is lost")
        schema.install(catalogue, ["topology"])
        catalogue.execute("select topology.add_replicaset('r9', uuid => 'uuid-r9')")
        with pytest.raises(ServerUnavailable, match=NEW_TERM):
            client.receive(30)
        client.connect()
        assert client.topology.at.term == 1
        assert list(client.topology.replicasets) == ["uuid-r9"]


def test_a_new_primary_that_never_got_the_term_before_it_begins_one_that_is_told_apart(
    own_database, own_cluster
):
    with psycopg.connect(own_database, autocommit=True) as connection:
        make_catalogue(connection)
    standby = own_cluster.standby()
    servers = make_conninfo(
        own_database, host="127.0.0.1,127.0.0.1", port=f"{own_cluster.port},{standby.port}"
    )
    try:
        standby.wait_for_replay(own_cluster)
        standby.stop()
        own_cluster.restart()
        with relay_process(servers) as relay, TopologyClient(relay.conninfo()) as client:
            with psycopg.connect(own_database, autocommit=True) as connection:
                connection.execute("select topology.set_state('r1-i2', 'Offline')")
            assert client.receive(30)[0].raft.term == 2
            own_cluster.kill()
            standby.start()
            standby.promote()
            with pytest.raises(ServerUnavailable, match=NEW_TERM):
                client.receive(60)
            client.connect()
            assert client.topology.at.term == 2
            assert client.topology.instances["uuid-r1-i2"].state == "Online"
    finally:
        standby.remove()


def test_a_catalogue_that_failed_over_is_followed_to_its_new_primary(own_database, own_cluster):
    with psycopg.connect(own_database, autocommit=True) as connection:
        make_catalogue(connection)
    standby = own_cluster.standby()
    servers = make_conninfo(
        own_database, host="127.0.0.1,127.0.0.1", port=f"{own_cluster.port},{standby.port}"
    )
    try:
        with relay_process(servers) as relay, TopologyClient(relay.conninfo()) as client:
            standby.wait_for_replay(own_cluster)
            own_cluster.kill()
            standby.promote()
            with pytest.raises(ServerUnavailable, match=NEW_TERM):
                client.receive(60)
            with psycopg.connect(standby.conninfo(), autocommit=True) as connection:
                connection.execute("select topology.set_master('r1', 'r1-i2')")
            client.connect()
            assert client.topology.at.term == 2
            assert client.topology.master("default", 1).uuid == "uuid-r1-i2"
    finally:
        standby.remove()
