"""The master of a replicaset, and its successor during a failover."""

from __future__ import annotations

import pytest
from psycopg import errors

from tests.topology import told

MASTER = "select topology.set_master(%s, %s)"
CHOSEN = "select target_master_name from topology._pico_replicaset where name = 'r1'"


def test_another_master_tells_both_by_uuid(catalogue):
    assert told(catalogue, MASTER, "r1", "r1-i2") == [
        {
            "op": "replace",
            "map": "replicaset",
            "replicaset_uuid": "uuid-r1",
            "current_master_uuid": "uuid-r1-i2",
        }
    ]


def test_masters_that_change_in_one_statement_are_told_in_the_order_of_their_replicasets(catalogue):
    # The table has r2 first, because an updated row moves to the end.
    catalogue.execute("update topology._pico_replicaset set tier = tier where name = 'r1'")
    made = told(catalogue, "update topology._pico_replicaset set current_master_name = name || '-i2'")
    assert [event["replicaset_uuid"] for event in made] == ["uuid-r1", "uuid-r2"]


def test_a_master_that_is_lost_without_another_is_no_event(catalogue):
    assert (
        told(catalogue, "update topology._pico_replicaset set current_master_name = '' where name = 'r1'")
        == []
    )


def test_a_master_that_comes_after_its_replicaset_is_told_then(connect):
    connection = connect()
    connection.execute(
        "insert into topology._pico_replicaset (name, uuid, current_master_name, target_master_name, tier) "
        "values ('r', 'ur', 'i', 'i', 'default')"
    )
    made = told(connection, "select topology.add_instance('i', 'r', 'h:1', uuid => 'ui')")
    assert [event["map"] for event in made] == ["instance", "replicaset"]
    assert made[1]["current_master_uuid"] == "ui"


def test_choosing_the_next_master_is_no_event(catalogue):
    catalogue.execute("select topology.set_state('r1-i1', 'Offline')")
    assert told(catalogue, "select topology.choose_master('r1', 'r1-i2')") == []
    assert catalogue.execute(CHOSEN).fetchone() == ("r1-i2",)


def test_nobody_is_chosen_in_place_of_a_master_that_is_online(catalogue):
    with pytest.raises(errors.Error, match="instance 'r1-i1' is the master of replicaset 'r1'") as caught:
        catalogue.execute("select topology.choose_master('r1', 'r1-i2')")
    assert caught.value.sqlstate == "PC008"
    assert catalogue.execute(CHOSEN).fetchone() == ("r1-i1",)


def test_nobody_is_chosen_in_place_of_another_one_that_was_and_is_online(catalogue):
    catalogue.execute("select topology.add_instance('r1-i3', 'r1', '127.0.0.1:13')")
    catalogue.execute("select topology.set_state('r1-i1', 'Offline'), topology.choose_master('r1', 'r1-i2')")
    with pytest.raises(errors.Error, match="'r1-i2' is the master .*, or was chosen to be it, and is Online"):
        catalogue.execute("select topology.choose_master('r1', 'r1-i3')")
    catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    catalogue.execute("select topology.choose_master('r1', 'r1-i3')")
    assert catalogue.execute(CHOSEN).fetchone() == ("r1-i3",)


def test_a_master_is_not_online_again_while_another_one_was_chosen_and_is_online(catalogue):
    catalogue.execute("select topology.set_state('r1-i1', 'Offline'), topology.choose_master('r1', 'r1-i2')")
    with pytest.raises(errors.Error, match="'r1-i2' is the master .*, or was chosen to be it, and is Online"):
        catalogue.execute("select topology.set_state('r1-i1', 'Online')")
    catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    catalogue.execute("select topology.set_state('r1-i1', 'Online')")
    chosen = "select target_master_name from topology._pico_replicaset order by name"
    assert catalogue.execute(chosen).fetchall() == [("r1-i1",), ("r2-i1",)]


def test_a_choice_ends_when_a_master_is_recorded(catalogue):
    catalogue.execute("select topology.set_state('r1-i1', 'Offline'), topology.choose_master('r1', 'r1-i2')")
    catalogue.execute(MASTER, ["r1", "r1-i2"])
    catalogue.execute("select topology.set_state('r1-i1', 'Online')")
    catalogue.execute(MASTER, ["r1", "r1-i1"])
    assert catalogue.execute(CHOSEN).fetchone() == ("r1-i1",)


def test_who_was_the_master_counts_as_chosen_no_more_when_plain_sql_records_another_one(catalogue):
    catalogue.execute("update topology._pico_replicaset set current_master_name = 'r1-i2' where name = 'r1'")
    assert catalogue.execute(CHOSEN).fetchone() == ("r1-i2",)
    catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    catalogue.execute("select topology.set_state('r1-i2', 'Online')")


def test_an_instance_that_plain_sql_sets_as_the_next_master_is_chosen(catalogue):
    catalogue.execute(
        "update topology._pico_replicaset set current_master_name = 'r1-i2', target_master_name = '' "
        "where name = 'r1'"
    )
    assert catalogue.execute(CHOSEN).fetchone() == ("",)


def test_a_choice_ends_when_who_was_chosen_is_taken_out(catalogue):
    catalogue.execute("select topology.set_state('r1-i1', 'Offline'), topology.choose_master('r1', 'r1-i2')")
    catalogue.execute("select topology.remove_instance('r1-i2')")
    assert catalogue.execute(CHOSEN).fetchone() == ("r1-i1",)
