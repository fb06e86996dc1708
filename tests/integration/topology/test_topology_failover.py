"""Promoting the standby of a dead master: which one, when not, and again after a failure."""

from __future__ import annotations

from contextlib import closing
from select import select

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_pgchange.feeds.connect import connect as connect_ours
from airflow_pgchange.feeds.errors import Refused
from airflow_pgchange.topology import failover
from tests.failovers import INSTANCES, REPLAYED, is_standby, make_replicaset, master, start, wait_until


@pytest.fixture
def catalogue(connect, own_cluster, standbys):
    """With one replicaset: a master, i0, and its standbys i1 and i2."""
    connection = connect()
    make_replicaset(connection, [own_cluster, *standbys])
    return connection


def unrecorded(catalogue):
    """Promote a standby, and fail to record that it is the master; who was promoted."""
    catalogue.execute(
        "create function fails() returns trigger language plpgsql as $$ begin raise 'not recorded'; end $$;"
        "create trigger fails before update of current_master_name on topology._pico_replicaset "
        "for each row execute function fails()"
    )
    with pytest.raises(psycopg.Error, match="not recorded"):
        failover.fail_over(catalogue, INSTANCES, "r")
    catalogue.execute("drop function fails cascade")
    query = "select target_master_name from topology._pico_replicaset where name = 'r'"
    return catalogue.execute(query).fetchone()[0]


def test_the_standby_that_has_most_of_the_log_becomes_the_master(catalogue, own_cluster, standbys):
    """Seconds: two standbys are made, and one has to lag."""
    standbys[0].stop()
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        connection.execute("create table late ()")
    standbys[1].wait_for_replay(own_cluster)
    own_cluster.kill()
    start(standbys[0])
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    assert failover.without_master(catalogue) == ["r"]
    assert failover.fail_over(catalogue, INSTANCES, "r") == master(catalogue) == "i2"
    assert failover.without_master(catalogue) == []
    with psycopg.connect(standbys[1].conninfo(), autocommit=True) as connection:
        connection.execute("insert into late default values")


def test_a_standby_that_knows_every_instance_follows_the_new_master(catalogue, own_cluster, standbys):
    servers = {f"i{number}": server for number, server in enumerate([own_cluster, *standbys])}
    ports = ",".join(str(server.port) for server in servers.values())
    instances = (
        f"host={','.join(['127.0.0.1'] * 3)} port={ports} user=postgres target_session_attrs=read-write"
    )
    for standby in standbys:
        with psycopg.connect(standby.conninfo(), autocommit=True) as connection:
            for name, value in {"primary_conninfo": instances, "wal_retrieve_retry_interval": "50ms"}.items():
                query = sql.SQL("alter system set {} = {}").format(sql.Identifier(name), value)
                connection.execute(query)
            connection.execute("select pg_reload_conf()")
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    promoted = servers[failover.fail_over(catalogue, INSTANCES, "r")]
    with psycopg.connect(promoted.conninfo(), autocommit=True) as connection:
        connection.execute("create table late ()")
    (other,) = (standby for standby in standbys if standby is not promoted)
    other.wait_for_replay(promoted)


def test_what_a_standby_had_before_it_was_restarted_counts(catalogue, own_cluster, standbys):
    standbys[0].stop()
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        connection.execute("create table late ()")
    standbys[1].wait_for_replay(own_cluster)
    own_cluster.kill()
    standbys[1].stop()
    for standby in standbys:
        start(standby)
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    assert failover.fail_over(catalogue, INSTANCES, "r") == "i2"


def test_a_standby_that_has_not_replayed_all_that_it_had_when_it_was_started_is_not_passed_over(
    catalogue, own_cluster, standbys
):
    first, second = standbys
    with psycopg.connect(second.conninfo(), autocommit=True) as connection:
        connection.execute("select pg_wal_replay_pause()")
        # From its next start on.
        connection.execute("alter system set recovery_min_apply_delay = '1h'")
    wait_until(second, "select pg_get_wal_replay_pause_state() = 'paused'")
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        connection.execute("create table late ()")
        first.wait_for_replay(own_cluster)
        first.stop()
        connection.execute("create table later ()")
        (written,) = connection.execute("select pg_current_wal_lsn()::text").fetchone()
    wait_until(second, f"select pg_last_wal_receive_lsn() >= '{written}'::pg_lsn")
    own_cluster.kill()
    second.kill()
    start(first)
    second.start()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    with pytest.raises(
        Refused, match="i2 of replicaset r was started and has not replayed all .*: try again"
    ):
        failover.fail_over(catalogue, INSTANCES, "r")
    assert is_standby(first)
    with psycopg.connect(second.conninfo(), autocommit=True) as connection:
        connection.execute("alter system reset recovery_min_apply_delay")
        connection.execute("select pg_reload_conf()")
    wait_until(second, REPLAYED)
    assert failover.fail_over(catalogue, INSTANCES, "r") == "i2"


def test_a_failover_that_was_not_recorded_goes_on_with_the_standby_that_it_promoted(
    catalogue, own_cluster, standbys
):
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    first = unrecorded(catalogue)
    assert master(catalogue) == "i0"
    assert failover.fail_over(catalogue, INSTANCES, "r") == master(catalogue) == first


def test_one_that_was_promoted_and_not_recorded_is_not_forgotten_where_it_does_not_answer(
    catalogue, own_cluster, standbys
):
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    first = unrecorded(catalogue)
    promoted, other = standbys if first == "i1" else standbys[::-1]
    promoted.kill()
    with pytest.raises(
        Refused, match=f"{first} was chosen to be the master, and does not answer, and may take writes"
    ):
        failover.fail_over(catalogue, INSTANCES, "r")
    assert is_standby(other)
    catalogue.execute("select topology.set_state(%s, 'Offline')", [first])
    assert failover.fail_over(catalogue, INSTANCES, "r") == master(catalogue) != first


def test_one_that_was_chosen_is_promoted_the_next_time(catalogue, own_cluster, standbys):
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline'), topology.choose_master('r', 'i1')")
    assert failover.fail_over(catalogue, INSTANCES, "r") == master(catalogue) == "i1"


def test_one_that_was_chosen_when_it_had_most_of_the_log_is_not_promoted_where_another_has_more(
    catalogue, own_cluster, standbys
):
    standbys[0].stop()
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        connection.execute("create table late ()")
    standbys[1].wait_for_replay(own_cluster)
    own_cluster.kill()
    start(standbys[0])
    catalogue.execute("select topology.set_state('i0', 'Offline'), topology.choose_master('r', 'i1')")
    with pytest.raises(
        Refused, match="i1 of replicaset r was chosen .* and has less of the log than i2: stop"
    ):
        failover.fail_over(catalogue, INSTANCES, "r")
    assert is_standby(standbys[0])
    catalogue.execute("select topology.set_state('i1', 'Offline')")
    assert failover.fail_over(catalogue, INSTANCES, "r") == "i2"


def test_of_two_failovers_at_once_one_gives_way(catalogue, own_cluster, standbys, monkeypatch):
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    best = failover._best

    def overtaken(replicaset, there, chosen):
        found = best(replicaset, there, chosen)
        other = "i2" if found.name == "i1" else "i1"
        catalogue.execute("select topology.choose_master('r', %s)", [other])
        return found

    monkeypatch.setattr(failover, "_best", overtaken)
    with pytest.raises(
        Refused, match="instance '.*' is the master of replicaset 'r', or was chosen to be it"
    ):
        failover.fail_over(catalogue, INSTANCES, "r")
    assert all(map(is_standby, standbys))


def test_who_was_promoted_is_recorded_though_a_standby_of_it_gets_more_while_they_are_asked(
    catalogue, own_cluster, standbys, monkeypatch
):
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    standbys[0].promote()
    follower = standbys[0].standby()
    wait_until(follower, REPLAYED)
    asked = failover._asked

    def writing_on(name, server):
        found = asked(name, server)
        if name == "i1":
            with psycopg.connect(standbys[0].conninfo(), autocommit=True) as connection:
                connection.execute("create table if not exists late ()")
            follower.wait_for_replay(standbys[0])
        return found

    monkeypatch.setattr(failover, "_asked", writing_on)
    try:
        address = f"127.0.0.1:{follower.port}"
        catalogue.execute("select topology.add_instance('i3', 'r', %s)", [address])
        assert failover.fail_over(catalogue, INSTANCES, "r") == master(catalogue) == "i1"
    finally:
        follower.remove()


def test_who_takes_writes_but_has_less_of_the_log_than_a_standby_is_not_taken_for_promoted(
    catalogue, own_cluster, standbys
):
    standbys[0].promote()
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        connection.execute("create table late as select generate_series(1, 100000)")
    standbys[1].wait_for_replay(own_cluster)
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    with pytest.raises(Refused, match="i1 .* takes writes already and has less of the log than i2: stop"):
        failover.fail_over(catalogue, INSTANCES, "r")
    assert master(catalogue) == "i0"


@pytest.mark.parametrize("as_standby", [True, False], ids=["standby", "primary"])
def test_an_older_master_that_came_back_with_more_of_its_own_log_does_not_become_the_master_again(
    catalogue, own_cluster, standbys, as_standby
):
    """Seconds: standbys are made, promoted and brought back."""
    first, second = own_cluster, standbys[0]
    second.stop()
    with psycopg.connect(first.conninfo(), autocommit=True) as connection:
        for number in range(8):
            connection.execute(f"create table late{number} (); select pg_switch_wal()")
    first.kill()
    second.start()
    second.promote()
    follower = second.standby()
    wait_until(follower, REPLAYED)
    try:
        if as_standby:
            (first.data / "standby.signal").touch()
        first.start()
        catalogue.execute("select topology.add_instance('i3', 'r', %s)", [f"127.0.0.1:{follower.port}"])
        catalogue.execute("select topology.set_master('r', 'i1')")
        catalogue.execute("select topology.set_state(name, 'Offline') from unnest(array['i1', 'i2']) name")
        second.kill()
        with pytest.raises(Refused, match="i0 of replicaset r .* an older timeline than i3"):
            failover.fail_over(catalogue, INSTANCES, "r")
        assert master(catalogue) == "i1"
        catalogue.execute("select topology.set_state('i0', 'Offline')")
        assert failover.fail_over(catalogue, INSTANCES, "r") == "i3"
    finally:
        follower.remove()


def test_a_replicaset_that_cannot_be_helped_holds_up_no_other(db, catalogue, own_cluster, standbys):
    own_cluster.kill()
    catalogue.execute(
        "select topology.add_replicaset('hopeless'), topology.add_instance('h0', 'hopeless', '127.0.0.1:1'),"
        "topology.set_master('hopeless', 'h0')"
    )
    catalogue.execute("select topology.set_state(name, 'Offline') from unnest(array['h0', 'i0']) name")
    with pytest.raises(ExceptionGroup, match="no standby of replicaset hopeless answers"):
        failover.fail_over_all(db, INSTANCES)
    assert master(catalogue) in ("i1", "i2")
    assert failover.without_master(catalogue) == ["hopeless"]


def test_a_failover_is_recorded_though_the_catalogue_has_another_isolation_by_default(
    db, catalogue, own_cluster, standbys
):
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    catalogue.execute(
        f"alter database \"{catalogue.info.dbname}\" set default_transaction_isolation = 'serializable'"
    )
    failover.fail_over_all(db, INSTANCES)
    assert master(catalogue) in ("i1", "i2")


def test_a_failover_is_recorded_though_the_catalogue_ends_sessions_that_are_idle_while_it_asks_and_promotes(
    db, catalogue, own_cluster, standbys, monkeypatch
):
    own_cluster.kill()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    hasty = make_conninfo(db, options="-c idle_session_timeout=1000")
    asked = failover._asked

    def slow(name, server):
        if name == "i1":
            with closing(connect_ours(hasty)) as victim:
                select([victim.fileno()], [], [])
        return asked(name, server)

    monkeypatch.setattr(failover, "_asked", slow)
    failover.fail_over_all(hasty, INSTANCES)
    assert master(catalogue) in ("i1", "i2")


def test_nobody_becomes_the_master_while_two_take_writes(catalogue, own_cluster, standbys):
    own_cluster.kill()
    for standby in standbys:
        standby.promote()
    catalogue.execute("select topology.set_state('i0', 'Offline')")
    with pytest.raises(Refused, match="i1, i2 of replicaset r take writes already: stop"):
        failover.fail_over(catalogue, INSTANCES, "r")
    assert master(catalogue) == "i0"
