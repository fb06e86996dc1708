"""A failover asks every instance first: who is there and may take writes is not passed over, whatever it answers."""

from __future__ import annotations

from contextlib import ExitStack

import psycopg
import pytest

from airflow_pgchange.feeds.errors import Refused, ServerUnavailable
from airflow_pgchange.topology import failover, replies
from tests.failovers import (
    INSTANCES,
    in_place_of_the_master,
    is_standby,
    make_replicaset,
    master,
    standbys_of,
    start,
)
from tests.suite import clusters


@pytest.fixture(scope="module")
def unharmed(server):
    """A master and its standbys for tests that none of them is harmed in, if all is well."""
    primary = clusters.new_cluster(server)
    try:
        with standbys_of(server, primary) as standbys:
            yield [primary, *standbys]
    finally:
        primary.remove()


@pytest.fixture
def quiet(connect, unharmed):
    """A catalogue in which the master of these, i0, is Offline."""
    connection = connect()
    make_replicaset(connection, unharmed)
    connection.execute("select topology.set_state('i0', 'Offline')")
    return connection


@pytest.fixture
def dead(quiet, unharmed):
    """The same, whose master was killed; the next test finds all of them again."""
    unharmed[0].kill()
    yield quiet
    unharmed[0].start()


@pytest.fixture
def catalogue(connect, own_cluster, standbys):
    """With one replicaset: a master, i0, and its standbys i1 and i2."""
    connection = connect()
    make_replicaset(connection, [own_cluster, *standbys])
    return connection


@pytest.fixture
def full(unharmed):
    """The master lets nobody else in as app, the role that fails over."""
    primary, *standbys = unharmed
    with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
        connection.execute(
            "create role app login connection limit 1; grant execute on function pg_promote to app"
        )
        for standby in standbys:
            standby.wait_for_replay(primary)
        with psycopg.connect(primary.conninfo(user="app")):
            yield
        connection.execute("drop owned by app; drop role app")


def test_a_master_that_still_takes_writes_is_not_replaced(quiet, unharmed):
    with pytest.raises(Refused, match="i0, the master of replicaset r, .* still takes writes: stop it"):
        failover.fail_over(quiet, INSTANCES, "r")
    assert all(map(is_standby, unharmed[1:]))


@pytest.mark.usefixtures("full")
def test_a_master_that_is_there_and_does_not_let_us_in_is_not_replaced(quiet, unharmed):
    with pytest.raises(Refused, match="i0, the master of replicaset r, .* answers, but .*: stop it"):
        failover.fail_over(quiet, "dbname=postgres user=app", "r")
    assert master(quiet) == "i0"
    assert all(map(is_standby, unharmed[1:]))


def test_a_master_that_has_no_memory_for_another_process_is_there_and_not_replaced(dead, unharmed):
    def refuse(client):
        client.sendall(b"Ecould not fork new process for connection: Cannot allocate memory\n\0")

    with (
        in_place_of_the_master(dead, refuse),
        pytest.raises(Refused, match="i0, the master of replicaset r, .* answers, but .*: stop it"),
    ):
        failover.fail_over(dead, INSTANCES, "r")
    assert all(map(is_standby, unharmed[1:]))


def test_a_master_that_lets_us_in_and_never_answers_holds_up_nobody(dead, unharmed, monkeypatch):
    asked = failover._asked

    def asked_for_a_moment(name, server):
        with monkeypatch.context() as patched:
            if name == "i0":
                patched.setattr(failover, "ANSWERED_WITHIN", 0.2)
            return asked(name, server)

    monkeypatch.setattr(failover, "_asked", asked_for_a_moment)

    def hang(client):
        while len(said := client.recv(1000)) == 8:
            client.sendall(b"N")
        if said:
            client.sendall(replies.authenticated(1, 1) + replies.READY)
        while client.recv(1000):
            pass

    with (
        in_place_of_the_master(dead, hang),
        pytest.raises(Refused, match="i0, the master of replicaset r, .* answers, but .*: stop it"),
    ):
        failover.fail_over(dead, INSTANCES, "r")
    assert all(map(is_standby, unharmed[1:]))


def test_a_master_that_came_back_while_the_standbys_were_asked_is_not_replaced(quiet, unharmed, monkeypatch):
    unharmed[0].stop()
    asked = failover._asked

    def coming_back(name, server):
        if name == "i2":
            unharmed[0].start()
        return asked(name, server)

    monkeypatch.setattr(failover, "_asked", coming_back)
    with pytest.raises(Refused, match="i0, the master of replicaset r, .* still takes writes: stop it"):
        failover.fail_over(quiet, INSTANCES, "r")
    assert all(map(is_standby, unharmed[1:]))


def test_a_standby_that_is_there_and_does_not_let_us_in_is_not_passed_over(catalogue, own_cluster, standbys):
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        # Whose connections to i2 overlap, as a server is still at one for a moment after it was closed.
        connection.execute(
            "create role app login connection limit 8; grant execute on function pg_promote to app"
        )
        for standby in standbys:
            standby.wait_for_replay(own_cluster)
        standbys[1].stop()
        connection.execute("create table late ()")
    standbys[0].wait_for_replay(own_cluster)
    own_cluster.kill()
    start(standbys[1])
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    with (
        ExitStack() as all_that_may_be,
        pytest.raises(
            Refused, match="i1 answers, but .* may .* have most of the log: .* Offline to go on without"
        ),
    ):
        for _ in range(8):
            all_that_may_be.enter_context(psycopg.connect(standbys[0].conninfo(user="app")))
        failover.fail_over(catalogue, "dbname=postgres user=app", "r")
    assert master(catalogue) == "i0"
    catalogue.execute("select topology.set_state('i1', 'Offline')")
    assert failover.fail_over(catalogue, "dbname=postgres user=app", "r") == "i2"


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("variable", "value", "options"),
    [
        ("PGSSLROOTCERT", "system", "sslrootcert=''"),
        ("PGSSLNEGOTIATION", "direct", "sslnegotiation=postgres"),
    ],
)
def test_a_master_that_is_there_is_not_replaced_whatever_the_environment_wants_of_encryption(
    quiet, monkeypatch, variable, value, options
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(Refused, match="i0, the master of replicaset r, .* answers, but .*: stop it"):
        failover.fail_over(quiet, f"dbname=postgres user=app {options}", "r")
    assert master(quiet) == "i0"


def test_a_master_with_which_no_encryption_can_be_agreed_is_there_and_not_replaced(quiet):
    with pytest.raises(Refused, match="i0, the master of replicaset r, .* answers, but .*: stop it"):
        failover.fail_over(quiet, f"{INSTANCES} sslmode=require", "r")
    assert master(quiet) == "i0"


def test_who_is_of_another_cluster_does_not_become_the_master(dead, cluster):
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        for number in range(8):
            connection.execute(f"create temporary table late{number} (); select pg_switch_wal()")
    dead.execute("select topology.set_address('i2', %s)", [f"127.0.0.1:{cluster.port}"])
    with pytest.raises(Refused, match="i1, i2 of replicaset r are not of one cluster: .*set_address"):
        failover.fail_over(dead, INSTANCES, "r")
    assert master(dead) == "i0"


def test_nobody_is_promoted_while_a_server_of_another_cluster_is_where_the_master_was(
    server, quiet, unharmed
):
    other = clusters.new_cluster(server, family=0)
    try:
        (other.data / "standby.signal").touch()
        other.restart()
        quiet.execute("select topology.set_address('i0', %s)", [f"127.0.0.1:{other.port}"])
        with pytest.raises(Refused, match="i1, i2, i0 of replicaset r are not of one cluster: .*set_address"):
            failover.fail_over(quiet, INSTANCES, "r")
    finally:
        other.remove()
    assert master(quiet) == "i0"
    assert all(map(is_standby, unharmed[1:]))


@pytest.mark.parametrize("name", ["i0", "i2"])
def test_nobody_is_promoted_while_one_without_an_address_cannot_be_asked(quiet, unharmed, name):
    quiet.execute(
        "delete from topology._pico_peer_address where raft_id = "
        "(select raft_id from topology._pico_instance where name = %s)",
        [name],
    )
    with pytest.raises(Refused, match=f"{name} of replicaset r has no address.*set_address"):
        failover.fail_over(quiet, INSTANCES, "r")
    assert all(map(is_standby, unharmed[1:]))


@pytest.mark.parametrize("name", ["i0", "i2"])
def test_nobody_is_promoted_while_one_has_an_address_that_can_be_none(quiet, unharmed, name):
    quiet.execute("select topology.set_address(%s, '10.0.0..1:5432')", [name])
    with pytest.raises(Refused, match=f"{name} has an address that can be none.*set_address"):
        failover.fail_over(quiet, INSTANCES, "r")
    assert all(map(is_standby, unharmed[1:]))


def test_a_replicaset_without_a_standby_that_answers_says_so(dead, unharmed):
    for standby in unharmed[1:]:
        standby.stop("immediate")
    with pytest.raises(ServerUnavailable, match="no standby of replicaset r answers"):
        failover.fail_over(dead, INSTANCES, "r")
    assert master(dead) == "i0"
    for standby in unharmed[1:]:
        start(standby)
