"""The rights of roles on a catalogue and its log, tried as the roles themselves."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import consumers, dead_letters, manual_operations
from airflow_pgchange.errors import PermissionDenied
from airflow_pgchange.feeds import ConsumerTransaction, TopologyFeed
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.draining import Plan, drain
from tests.batches import taken

FEED = TopologyFeed("router")
DENIED = psycopg.errors.InsufficientPrivilege
CHANGES = [
    "select topology.add_replicaset('r3')",
    "select topology.add_instance('r3-i1', 'r3', '127.0.0.1:31')",
    "select topology.set_address('r3-i1', '127.0.0.1:32')",
    "select topology.choose_master('r3', 'r3-i1')",
    "select topology.set_master('r3', 'r3-i1')",
    "select topology.set_state('r2-i2', 'Offline')",
    "select topology.assign_buckets('default', 3000, 3999, 'r3')",
    "select topology.move_buckets('default', 0, 999, 'copying', 'r2')",
    "select topology.remove_instance('r2-i2')",
]


@pytest.fixture
def granted(catalogue, role):
    """Create a role with some grants, and return its connection string."""

    def make(*grants):
        who = role("user")
        for grant in grants:
            catalogue.execute(f"select topology.grant_{grant}(%s::regrole)", [who.name])
        return who.conninfo

    return make


def give_up(conninfo):
    """Fail on the next batch for the last time, and return its dead letter."""

    def fail(transaction, batch):
        raise ValueError("poison")

    plan = Plan(FEED, conninfo, max_batches=1, max_attempts=1, on_give_up="dead_letter")
    (letter,) = drain(plan, fail).letters
    return letter


def work(conninfo):
    return [change.id for change in taken(FEED, conninfo)]


@pytest.mark.parametrize("grants", [(), ("reader",), ("consumer",), ("admin",)])
def test_nobody_but_an_operator_changes_the_catalogue(granted, connect_to, grants):
    other = connect_to(granted(*grants))
    for change in [*CHANGES, "delete from topology._pico_instance", "delete from topology.log"]:
        with pytest.raises(DENIED):
            other.execute(change)


def test_an_operator_changes_the_catalogue_by_its_functions_and_not_past_them(granted, connect_to, catalogue):
    operator = connect_to(granted("writer"))
    for change in CHANGES:
        operator.execute(change)
    assert catalogue.execute("select count(*) from topology._pico_instance").fetchone() == (4,)
    with pytest.raises(DENIED):
        operator.execute("delete from topology._pico_instance")


def test_a_consumer_works_off_the_log_and_gives_up_what_it_cannot_process(granted, connect_to, catalogue):
    conninfo = granted("consumer")
    connection = connect_to(conninfo)
    assert give_up(conninfo) > 0
    assert lag(connection, connection, FEED).ready == 0
    catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    assert len(work(conninfo)) == 1
    assert work(conninfo) == []


def test_a_consumer_that_may_change_the_catalogue_can_record_a_master(granted, catalogue):
    conninfo = granted("consumer", "writer")
    with ConsumerTransaction(FEED, conninfo) as consumer:
        consumer.claim(1000)
        consumer.ack(lambda own: own.execute("select topology.set_master('r1', 'r1-i2')"))
    query = "select current_master_name from topology._pico_replicaset where name = 'r1'"
    assert catalogue.execute(query).fetchone() == ("r1-i2",)


def test_a_consumer_does_not_move_trim_or_send_again(granted, connect_to):
    conninfo = granted("consumer")
    connection, letter = connect_to(conninfo), give_up(conninfo)
    for does in (
        lambda: manual_operations.move_consumer(connection, connection, FEED, "beginning"),
        lambda: manual_operations.drop_consumer(connection, connection, FEED),
        lambda: dead_letters.redrive(connection, ids=[letter]),
    ):
        with pytest.raises(PermissionDenied):
            does()
    with pytest.raises(DENIED):
        connection.execute("select topology.trim_log('0 s')")


def test_a_keeper_looks_sends_again_trims_moves_and_drops(granted, connect_to, catalogue):
    conninfo = granted("admin")
    connection, letter = connect_to(conninfo), give_up(conninfo)
    assert [one["consumer"] for one in consumers.status(connection)] == ["topology:router"]
    assert dead_letters.redrive(connection, ids=[letter]) == [letter]
    events = work(conninfo)
    assert len(events) == catalogue.execute("select count(*) from topology.log").fetchone()[0]
    manual_operations.move_consumer(connection, connection, FEED, "beginning")
    assert work(conninfo) == events
    assert "trimmed" in connection.execute("select topology.trim_log('0 s')").fetchone()[0]
    manual_operations.drop_consumer(connection, connection, FEED)
    assert consumers.status(connection) == []
