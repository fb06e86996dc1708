"""Catalogues that were restored or installed anew, and whose log has grown since: their events differ from those that
clients received."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.admin import schema
from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.topology import TopologyClient
from tests import dumps
from tests.relay_process import relay_process
from tests.topology import make_catalogue

NEW_TERM = "restarted, restored or failed over"
OFFLINE = "select topology.set_state('r1-i2', 'Offline')"
OTHER = "select topology.set_state('r2-i2', 'Offline')"
SWAP = """
    select pg_terminate_backend(pid) from pg_stat_activity where datname in ({old}, {new});
    alter database {old} rename to {aside};
    alter database {new} rename to {old};
    alter database {aside} rename to {new};
"""


@pytest.fixture
def psql(cluster, db):
    """A function that runs a script in a database, in one transaction."""

    def run(script, database=db):
        dumps.load(cluster, database, script, "--single-transaction")

    return run


@pytest.fixture
def dump(cluster, db):
    """A function that returns a catalogue as a script, with the objects that it needs if they are missing."""

    def take(*needed):
        schemas = [word for name in (*needed, "topology") for word in ("-n", name)]
        return dumps.dump(cluster, db, *schemas).decode()

    return take


@pytest.fixture
def swap(cluster):
    """A function that gives a database the name of another."""

    def run(conninfo, other):
        old, new = (conninfo_to_dict(one)["dbname"] for one in (conninfo, other))
        names = {"old": old, "new": new, "aside": f"{old}_aside"}
        given = {name: sql.Identifier(value) for name, value in names.items()}
        terminate, *renames = SWAP.strip().splitlines()
        with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
            connection.execute(sql.SQL(terminate).format(old=old, new=new))
            for rename in renames:
                connection.execute(sql.SQL(rename).format(**given))

    return run


def test_a_catalogue_that_was_installed_anew_and_has_as_many_events_is_told_anew(db, catalogue):
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        with catalogue.transaction():
            schema.uninstall(catalogue, ["topology"])
            schema.install(catalogue, ["topology"])
            make_catalogue(catalogue)
            catalogue.execute(OTHER)
        with pytest.raises(ServerUnavailable, match=NEW_TERM):
            client.receive(30)
        client.connect()
        assert client.topology.instances["uuid-r2-i2"].state == "Offline"


def test_a_catalogue_that_was_restored_in_its_place_begins_a_new_term(db, catalogue, dump, psql):
    script = dump()
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        catalogue.execute(OFFLINE)
        client.receive(30)
        psql(f"drop schema topology cascade; {script} {OTHER};")
        with pytest.raises(ServerUnavailable, match=NEW_TERM):
            client.receive(30)
        client.connect()
        states = [client.topology.instances[f"uuid-{name}-i2"].state for name in ("r1", "r2")]
        assert (client.topology.at.term, states) == (2, ["Online", "Offline"])


def test_a_catalogue_that_was_restored_elsewhere_and_put_in_its_place_begins_a_new_term(
    db, bare_db, catalogue, dump, psql, swap
):
    psql(dump("pgchange", "pgchange_sealed"), bare_db)
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        catalogue.execute(OFFLINE)
        client.receive(30)
        psql(f"{OTHER};", bare_db)
        swap(db, bare_db)
        with pytest.raises(ServerUnavailable, match=NEW_TERM):
            client.receive(30)
        client.connect()
        states = [client.topology.instances[f"uuid-{name}-i2"].state for name in ("r1", "r2")]
        assert (client.topology.at.term, states) == (2, ["Online", "Offline"])


def test_a_log_that_was_emptied_and_filled_again_begins_a_new_term(catalogue):
    with catalogue.transaction():
        catalogue.execute("create temporary table kept as table topology.log")
        catalogue.execute("truncate topology.log; insert into topology.log select * from kept")
    assert catalogue.execute("select term from topology.begin_term()").fetchone() == (2,)
