"""The catalogue's events: in the form of the protocol's description, and in the order of commit."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest
from psycopg import IsolationLevel, errors

from tests.topology import last, make_catalogue, since, told
from tests.waiting import until, waits


@pytest.fixture(scope="module")
def unchanged(shared):
    """A connection to a catalogue for all tests of changes that are refused."""
    make_catalogue(shared)
    before = last(shared)
    yield shared
    assert last(shared) == before


def test_every_event_has_op_map_time_and_raft_and_then_its_own_fields(catalogue):
    row = catalogue.execute("select event::text from topology.log order by index limit 1").fetchone()
    assert re.fullmatch(
        r'\{"op":"replace","map":"replicaset","timestamp":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00",'
        r'"raft":\{"term":1,"index":1\},"replicaset_uuid":"uuid-r1"\}',
        row[0],
    )


def test_an_instance_comes_with_all_that_is_known_of_it(catalogue):
    made = told(catalogue, "select topology.add_instance('r1-i3', 'r1', '127.0.0.1:1333', uuid => 'u3')")
    assert made == [
        {
            "op": "replace",
            "map": "instance",
            "tier": "default",
            "replicaset_uuid": "uuid-r1",
            "instance_uuid": "u3",
            "current_state": "Online",
            "address": "127.0.0.1:1333",
        }
    ]


def test_another_state_tells_the_state_alone(catalogue):
    assert told(catalogue, "select topology.set_state('r1-i2', 'Offline')") == [
        {"op": "replace", "map": "instance", "instance_uuid": "uuid-r1-i2", "current_state": "Offline"}
    ]


def test_an_instance_that_changes_its_replicaset_by_plain_sql_tells_what_changed(catalogue):
    query = "update topology._pico_instance set replicaset_name = 'r2', tier = 'hot' where name = 'r1-i2'"
    assert told(catalogue, query) == [
        {
            "op": "replace",
            "map": "instance",
            "tier": "hot",
            "replicaset_uuid": "uuid-r2",
            "instance_uuid": "uuid-r1-i2",
        }
    ]


def test_another_incarnation_of_a_state_is_no_event(catalogue):
    assert told(catalogue, """update topology._pico_instance set current_state = '["Online", 7]'""") == []


@pytest.mark.parametrize("state", ["[]", "[null, 1]", "[1]", '"Online"', '{"0": "Online"}'])
def test_an_instance_has_a_state_whatever_is_written(unchanged, state):
    with pytest.raises(errors.CheckViolation):
        unchanged.execute("update topology._pico_instance set current_state = %s", [state])


def test_a_replicaset_that_comes_after_its_instances_is_told_as_theirs_then(connect):
    connection = connect()
    connection.execute(
        "insert into topology._pico_instance "
        "(name, uuid, raft_id, replicaset_name, current_state, target_state, tier) "
        """values ('i', 'ui', 1, 'r', '["Online", 1]', '["Online", 1]', 'default')"""
    )
    made = told(connection, "select topology.add_replicaset('r', uuid => 'ur')")
    assert made == [
        {"op": "replace", "map": "replicaset", "replicaset_uuid": "ur"},
        {"op": "replace", "map": "instance", "replicaset_uuid": "ur", "instance_uuid": "ui"},
    ]


def test_another_address_is_an_instances_event(catalogue):
    assert told(catalogue, "select topology.set_address('r1-i1', 'other:1')") == [
        {"op": "replace", "map": "instance", "instance_uuid": "uuid-r1-i1", "address": "other:1"}
    ]


def test_addresses_of_the_other_protocol_are_no_events(catalogue):
    assert told(catalogue, "insert into topology._pico_peer_address values (1, 'h:3301', 'iproto')") == []


@pytest.mark.parametrize("instance", ["r1-i2", "r2-i2"])
def test_an_instance_that_goes_is_told(catalogue, instance):
    assert told(catalogue, "select topology.remove_instance(%s)", instance) == [
        {"op": "delete", "map": "instance", "instance_uuid": f"uuid-{instance}"}
    ]


def test_a_replicaset_that_goes_is_told(catalogue):
    assert told(catalogue, "delete from topology._pico_replicaset where name = 'r2'") == [
        {"op": "delete", "map": "replicaset", "replicaset_uuid": "uuid-r2"}
    ]


def test_a_replicaset_whose_buckets_have_moved_is_taken_out_by_functions(catalogue):
    for state, *target in [("copying", "r2"), ("copied",), ("active",)]:
        catalogue.execute(
            "select topology.move_buckets('default', 0, 2999, %s, %s)", [state, *(target or [None])]
        )
    gone = [f"select topology.remove_instance('r1-i{number}')" for number in (2, 1)]
    assert told(catalogue, "; ".join([*gone, "select topology.remove_replicaset('r1')"])) == [
        {"op": "delete", "map": "instance", "instance_uuid": "uuid-r1-i2"},
        {"op": "delete", "map": "instance", "instance_uuid": "uuid-r1-i1"},
        {"op": "delete", "map": "replicaset", "replicaset_uuid": "uuid-r1"},
    ]


def test_the_last_instance_stays_while_its_replicaset_has_buckets(catalogue):
    catalogue.execute("select topology.remove_instance('r1-i2')")
    with pytest.raises(errors.Error, match="replicaset 'r1' has buckets") as caught:
        catalogue.execute("select topology.remove_instance('r1-i1')")
    assert "move_buckets" in caught.value.diag.message_hint


def test_a_replicaset_whose_last_instance_has_gone_has_no_master(catalogue):
    catalogue.execute("select topology.remove_instance('r2-i2'), topology.remove_instance('r2-i1')")
    (made,) = told(catalogue, "select topology.add_instance('r2-i1', 'r2', '127.0.0.1:21')")
    assert made["map"] == "instance"


def test_buckets_are_told_when_they_are_copied_with_their_new_owner(catalogue):
    assert told(catalogue, "select topology.move_buckets('default', 0, 999, 'copying', 'r2')") == []
    assert told(catalogue, "select topology.move_buckets('default', 0, 999, 'copied')") == [
        {
            "op": "replace",
            "map": "bucket",
            "tier": "default",
            "state": "copied",
            "bucket_id": {"start": 0, "end": 999},
            "current_replicaset_uuid": "uuid-r2",
        }
    ]
    assert told(catalogue, "select topology.move_buckets('default', 0, 999, 'active')") == []


def test_a_copy_that_is_given_up_leaves_the_owner(catalogue):
    for state, target in (("copying", "r2"), ("aborting-copy", None), ("active", None)):
        catalogue.execute("select topology.move_buckets('default', 10, 19, %s, %s)", [state, target])
    row = catalogue.execute(
        "select current_replicaset_name, target_replicaset_name, state from topology._pico_bucket "
        "where bucket_id_start = 10"
    ).fetchone()
    assert row == ("r1", "r1", "active")


def test_of_a_copied_range_without_a_target_the_owner_stays_the_owner(catalogue):
    catalogue.execute(
        "insert into topology._pico_bucket values ('default', 3000, 3009, 'copied', 'r2', null)"
    )
    catalogue.execute("select topology.move_buckets('default', 3000, 3009, 'active')")
    query = "select state, current_replicaset_name from topology._pico_bucket where bucket_id_start = 3000"
    assert catalogue.execute(query).fetchall() == [("active", "r2")]


def test_a_state_that_is_there_already_is_told_to_nobody_and_expelled_is_for_ever(catalogue):
    for state in ("Offline", "Expelled"):
        catalogue.execute("select topology.set_state('r1-i2', %s)", [state])
        assert told(catalogue, f"select topology.set_state('r1-i2', '{state}')") == []
    with pytest.raises(errors.Error, match="instance 'r1-i2' was expelled"):
        catalogue.execute("select topology.set_state('r1-i2', 'Online')")


@pytest.mark.parametrize(("first", "last"), [(None, 5), (5, None), (-1, 5), (5, 4), (0, 9223372036854775807)])
def test_an_invalid_range_of_buckets_is_refused(unchanged, first, last):
    with pytest.raises(errors.Error, match="there are no buckets from"):
        unchanged.execute("select topology.check_range(%s, %s)", [first, last])


def test_behind_each_range_there_is_room_for_another_whatever_is_written(unchanged):
    with pytest.raises(errors.CheckViolation):
        unchanged.execute("update topology._pico_bucket set bucket_id_end = 9223372036854775807")


@pytest.mark.parametrize(
    "wrong",
    [
        "_pico_bucket set bucket_id_end = bucket_id_start - 1",
        "_pico_bucket set bucket_id_start = -1",
        "_pico_bucket set state = 'gone'",
        "_pico_replicaset set current_config_version = -1",
        "_pico_replicaset set target_config_version = -1",
        "_pico_instance set target_state = '{}'",
        "_pico_peer_address set address = ''",
        "_pico_peer_address set connection_type = 'http'",
    ],
)
def test_the_catalogue_holds_nothing_that_no_cluster_can_be_whoever_writes_it(unchanged, wrong):
    with pytest.raises(errors.CheckViolation):
        unchanged.execute(f"update topology.{wrong}")


def test_a_range_is_split_where_a_part_of_it_moves(catalogue):
    catalogue.execute("select topology.move_buckets('default', 100, 199, 'copying', 'r2')")
    rows = catalogue.execute(
        "select bucket_id_start, bucket_id_end, state from topology._pico_bucket order by 1"
    ).fetchall()
    assert rows == [(0, 99, "active"), (100, 199, "copying"), (200, 2999, "active")]


def test_the_snapshot_tells_replicasets_then_instances_then_active_buckets(catalogue):
    catalogue.execute("select topology.move_buckets('default', 0, 999, 'copying', 'r2')")
    events = [json.loads(row[0]) for row in catalogue.execute("select event::text from topology.snapshot()")]
    assert [event["map"] for event in events] == ["replicaset"] * 2 + ["instance"] * 4 + ["bucket"]
    assert events[0]["current_master_uuid"] == "uuid-r1-i1"
    assert events[-1]["bucket_id"] == {"start": 1000, "end": 2999}
    assert {(event["raft"]["term"], event["raft"]["index"]) for event in events} == {(1, last(catalogue))}


def test_of_what_a_snapshot_lacked_only_that_is_lacking_which_no_event_has_told(catalogue):
    def move(first, end, *state):
        catalogue.execute("select topology.move_buckets('default', %s, %s, %s, %s)", [first, end, *state])

    move(0, 9, "copying", "r2")
    lacking = "select (l).buckets ->> 'default', (l).arrived, (l).settled from topology.lacking(%s::jsonb, %s, %s) l"
    asked = catalogue.execute(
        "select topology.unsettled()::text, term, index from topology.now_at()"
    ).fetchone()
    move(0, 4, "copied", None)
    assert catalogue.execute(lacking, asked).fetchone() == ("{[5,10)}", False, False)
    move(5, 9, "aborting-copy", None)
    move(5, 9, "active", None)
    assert catalogue.execute(lacking, asked).fetchone() == ("{[5,10)}", True, False)
    move(0, 4, "active", None)
    assert catalogue.execute(lacking, asked).fetchone() == ("{[5,10)}", True, True)


@pytest.mark.parametrize(
    "change",
    [
        "select topology.set_state('{}', 'Offline')",
        "update topology._pico_instance set current_state = '[\"Offline\", 1]' where name = '{}'",
    ],
    ids=["by a function", "by an update"],
)
def test_indexes_are_in_the_order_of_commit(catalogue, connect, change):
    first, second = connect(), connect()
    with ThreadPoolExecutor(1) as pool:
        with first.transaction():
            first.execute(change.format("r1-i2"))
            late = pool.submit(second.execute, change.format("r2-i2"))
            until(catalogue, waits(second, behind=first))
        late.result(30)
    assert [event["instance_uuid"] for event in since(catalogue)[-2:]] == ["uuid-r1-i2", "uuid-r2-i2"]


def test_a_change_that_is_rolled_back_is_no_event(catalogue):
    before = last(catalogue)
    with catalogue.transaction(force_rollback=True):
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    assert since(catalogue, before) == []


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("select topology.set_master('r1', 'r2-i1')", "belongs to replicaset"),
        ("select topology.set_master('none', 'r2-i1')", "no replicaset"),
        ("select topology.set_master('r1', 'none')", "no instance"),
        ("select topology.set_state('r1-i1', 'Expelled')", "is the master"),
        ("select topology.set_state('r1-i1', 'Gone')", "no state"),
        ("select topology.set_state('r1-i1', null)", "no state"),
        ("select topology.add_instance('r1-i1', 'r1', 'h:1')", "there is already an instance"),
        ("select topology.add_instance('r1-i9', 'r1', '10.0.0.1')", "'10.0.0.1' is no address"),
        ("select topology.add_instance('r1-i9', 'r1', '127.0.0.1:21')", "address of instance 'r2-i1'"),
        ("select topology.set_address('r1-i1', ':5432')", "':5432' is no address"),
        ("select topology.set_address('r1-i2', '127.0.0.1:21')", "address of instance 'r2-i1'"),
        ("select topology.add_replicaset('r1')", "there is already a replicaset"),
        ("select topology.remove_instance('r1-i1')", "is the master"),
        ("select topology.remove_replicaset('r1')", "has instances"),
        ("select topology.assign_buckets('default', 2999, 3000, 'r2')", "belong to replicaset"),
        ("select topology.assign_buckets('other', 0, 1, 'r2')", "is of tier"),
        ("select topology.assign_buckets('default', 5, 1, 'r2')", "no buckets from"),
        ("select topology.assign_buckets('default', 3000, 9223372036854775807, 'r2')", "no buckets from"),
        ("select topology.move_buckets('default', 0, 9223372036854775807, 'copied')", "no buckets from"),
        ("select topology.move_buckets('default', 0, 9, 'copied')", "cannot become copied"),
        ("select topology.move_buckets('default', 0, 9, 'copying')", "a target is given"),
        ("select topology.move_buckets('default', 0, 9, 'copying', 'r1')", "cannot become copying"),
        ("select topology.move_buckets('default', 0, 3000, 'copying', 'r2')", "only 3000 are assigned"),
        ("select topology.move_buckets('default', 0, 9, 'lost')", "no state of buckets"),
        ("truncate topology._pico_bucket", "cannot be truncated"),
        ("update topology._pico_replicaset set uuid = 'other' where name = 'r1'", "cannot be changed"),
        ("update topology._pico_instance set name = 'other' where name = 'r1-i2'", "cannot be changed"),
    ],
)
def test_an_invalid_change_of_the_catalogue_is_refused(unchanged, query, reason):
    before = last(unchanged)
    with pytest.raises(errors.Error, match=reason) as caught:
        unchanged.execute(query)
    assert caught.value.sqlstate == "PC008"
    assert caught.value.diag.message_hint
    assert last(unchanged) == before


def test_an_instance_may_come_where_another_one_was(catalogue):
    catalogue.execute("select topology.set_state('r2-i2', 'Offline')")
    (made,) = told(catalogue, "select topology.add_instance('r1-i9', 'r1', '127.0.0.1:22')")
    assert made["address"] == "127.0.0.1:22"
    assert told(catalogue, "select topology.set_address('r1-i9', '127.0.0.1:22')") == []


def test_an_instance_is_not_online_again_where_another_one_is_now(catalogue):
    catalogue.execute("select topology.set_state('r2-i2', 'Offline')")
    catalogue.execute("select topology.add_instance('r1-i9', 'r1', '127.0.0.1:22')")
    with pytest.raises(errors.Error, match="address of instance 'r1-i9', which is Online") as caught:
        catalogue.execute("select topology.set_state('r2-i2', 'Online')")
    assert caught.value.sqlstate == "PC008"
    assert "set_address" in caught.value.diag.message_hint


@pytest.mark.parametrize(
    "isolation", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE], ids=lambda level: level.name
)
def test_who_would_not_see_what_others_have_just_changed_changes_nothing(catalogue, connect, isolation):
    blind = connect(autocommit=False)
    blind.isolation_level = isolation
    blind.execute("select 1")
    catalogue.execute("select topology.assign_buckets('default', 3000, 3999, 'r1')")
    with pytest.raises(errors.Error, match="isolation") as caught:
        blind.execute("select topology.assign_buckets('default', 3500, 4999, 'r2')")
    assert caught.value.sqlstate == "PC007"
    assert caught.value.diag.message_hint


def test_a_log_that_was_trimmed_goes_on_where_it_was(catalogue):
    query = "select term, index from topology.now_at()"
    before = catalogue.execute(query).fetchone()
    catalogue.execute("select topology.trim_log('0')")
    assert last(catalogue) == 0
    assert catalogue.execute(query).fetchone() == before
    assert catalogue.execute("select * from topology.events(%s, %s)", before).fetchall() == []


def test_a_log_is_trimmed_from_its_beginning_though_a_clock_was_set_back(catalogue):
    catalogue.execute("update topology.log set written_at = now() - interval '1 day' where index = 3")
    catalogue.execute("select topology.trim_log('1 hour')")
    assert catalogue.execute("select min(index) from topology.log").fetchone() == (4,)
    assert catalogue.execute("select term, index, events from topology.trimmed").fetchall() == [(1, 3, 3)]


def test_events_that_were_trimmed_are_not_passed_over_in_silence(catalogue):
    catalogue.execute("select topology.trim_log('0')")
    with pytest.raises(errors.Error, match="were trimmed") as caught:
        catalogue.execute("select * from topology.events(1, 1)")
    assert caught.value.sqlstate == "PC005"


def test_the_error_about_trimmed_events_names_the_last_of_the_latest_term(catalogue):
    for term in (1, 2):
        catalogue.execute("select topology.set_state('r1-i1', %s)", [["Offline", "Online"][term - 1]])
        catalogue.execute("update topology.log set term = %s", [term])
        catalogue.execute("select topology.trim_log('0')")
    with pytest.raises(errors.Error, match=r"were trimmed, up to \(2, "):
        catalogue.execute("select * from topology.events(1, 1)")


def test_events_that_clients_have_received_survive_a_crash_despite_asynchronous_commits(own_database):
    with psycopg.connect(own_database, autocommit=True) as connection:
        connection.execute("select topology.add_replicaset('r1'); create table witness ()")
        (writer,) = connection.execute(
            "select pid from pg_stat_activity where backend_type = 'walwriter'"
        ).fetchone()
        os.kill(writer, signal.SIGSTOP)
        connection.execute("set synchronous_commit = off")
        connection.execute("select topology.add_replicaset('r2')")
        connection.execute("insert into witness default values")
        os.kill(writer, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select pg_sleep(60)")
    with connected_again(own_database) as connection:
        assert connection.execute("select from witness").fetchall() == [], "the fault did not fire"
        assert len(since(connection)) == 2


def connected_again(conninfo):
    while True:
        with suppress(psycopg.OperationalError):
            return psycopg.connect(conninfo, autocommit=True)


def test_a_server_that_started_again_begins_a_new_term(catalogue):
    catalogue.execute("update topology.term set started_at = started_at - interval '1 hour'")
    catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    assert since(catalogue)[-1]["raft"]["term"] == 2
    row = catalogue.execute("select term from topology.begin_term()").fetchone()
    assert row == (2,)
