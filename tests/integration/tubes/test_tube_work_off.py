"""Processing control pods: none hinders another. A pod that can never be processed is deleted and reported, any other
stays."""

from __future__ import annotations

import json
import logging
import re

import pytest

from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import InvalidArgument, PermissionDenied, Refused, Stopped
from airflow_pgchange.feeds import TubeFeed
from airflow_pgchange.tubes import Control, TableDownstream, work_off
from tests.tubes import attach, controls, detach, drain, faults, make, one, pods, touched
from tests.waiting import until

FEED = TubeFeed("q")


def make_item(connection):
    """Create a table and its copy. The copy has a row that the table lacks."""
    connection.execute(
        "create schema qs; create table item (id bigint primary key, day date);"
        "create table qs.item (like item, primary key (id)); insert into qs.item values (7)"
    )
    make(connection)
    attach(connection)


@pytest.fixture
def prepared_item():
    return make_item


def copies(db, feed=FEED):
    return TableDownstream(db, db, feed, "{tube}s.{table}")


def put(connection, payload, op="T"):
    connection.execute("select tube.touch('q', 0, '{}', %s, %s)", [op, json.dumps(payload)])


END = {"type": "backfill_end", "tbl": "public.item"}
HOPELESS = {
    "nothing": None,
    "null": None,
    "a list": [],
    "a text": "x",
    "no type": {"tbl": "public.item"},
    "a type that is no text": {"type": {"a": 1}, "tbl": [1]},
    "of a user's own": {"type": "reindex", "how": "whole"},
    "no table": {"type": "truncate"},
    "a table that is a number": {"type": "truncate", "tbl": 5},
    "a table that does not parse": {"type": "truncate", "tbl": "a b c"},
    "a table that is an attack": {"type": "truncate", "tbl": "item where true); drop table qs.item; --"},
    "a table of too many parts": {"type": "truncate", "tbl": "qs.other.x"},
    "a table of another database": {"type": "truncate", "tbl": "postgres.public.item"},
    "a table that is gone": {"type": "truncate", "tbl": "public.gone"},
    "a table that is not attached": {"type": "truncate", "tbl": "public.idle"},
    "a table without a copy": {"type": "truncate", "tbl": "public.bare"},
    "a start that is a text": {**END, "start_seq": "abc"},
    "a start that is a fraction": {**END, "start_seq": 77.5},
    "a start that is an object": {**END, "start_seq": {"a": 1}},
    "no start": END,
    "a backfill of a table that is gone": {
        "type": "backfill_schedule",
        "tbl": "nope.nope",
        "order_col": "id",
    },
    "a backfill of a table that is not attached": {"type": "backfill_schedule", "tbl": "public.idle"},
    "a backfill in no order": {"type": "backfill_schedule", "tbl": "public.bare", "order_col": "zzz"},
    "a backfill in an odd order": {"type": "backfill_schedule", "tbl": "public.bare", "order_col": ["x"]},
    "a backfill of nothing": {"type": "backfill_schedule"},
}


def test_control_pods_that_can_never_be_done_hold_up_nobody_and_are_each_told(db, item, caplog):
    item.execute("create table idle (id bigint primary key); create table bare (id bigint primary key)")
    attach(item, "bare")
    for payload in HOPELESS.values():
        if payload is None:
            item.execute("insert into q (op, shard, ids) values ('T', 0, '{}')")
        else:
            put(item, payload)
    hopeless = [seq for (seq,) in item.execute("select seq from q order by seq")]
    item.execute("truncate item")
    with caplog.at_level(logging.WARNING):
        done = work_off(FEED, db, copies(db))
    assert pods(item) == [("T", 0, [7])]
    assert controls(item) == []
    assert [one.control.seq for one in done if one.given_up is not None] == hopeless
    assert len(done) == len(hopeless) + 1
    assert [message.startswith("control pod") for _, message in faults(item)] == [True] * len(HOPELESS)
    assert caplog.text.count("was given up") == len(HOPELESS)
    assert any("were given up" in line and "clear_faults('q')" in line for line in maintain(item).attention)


OLD_END = {"type": "backfill_end", "start_seq": "77"}
"""The payload of an end pod of older tubes: it names no table, so it means all tables of its shard."""


def test_the_end_of_a_backfill_that_names_no_table_is_of_each_table_in_its_shard(db, item):
    item.execute(
        "create table other (id bigint primary key); create table qs.other (like other, primary key (id))"
    )
    item.execute("create table bare (id bigint primary key); insert into qs.other values (8)")
    attach(item, "other")
    attach(item, "bare")
    put(item, OLD_END, op="B")
    (done,) = work_off(FEED, db, copies(db))
    assert (done.given_up, done.touched) == (None, 2)
    assert (touched(item), controls(item)) == ([7, 8], [])


def test_the_end_of_a_backfill_of_a_shard_without_tables_is_given_up(db, item):
    detach(item)
    put(item, OLD_END, op="B")
    (done,) = work_off(FEED, db, copies(db))
    assert done.given_up == "it names no table, and none is attached under shard 0"


def test_another_backfill_waits_for_the_end_of_one_that_names_no_table(item):
    put(item, OLD_END, op="B")
    assert one(item, "select tube.tube_backfill_schedule('q', 'id', 0, 0)") == 0


def test_a_control_pod_that_was_given_up_is_told_once_and_is_no_fault_of_a_capture(db, item):
    put(item, {"type": "backfill_schedule", "tbl": "public.item", "order_col": "zzz"})
    work_off(FEED, db, copies(db))
    assert len(faults(item)) == 1
    assert one(item, "select faults from tube.attachments()") == 0
    assert one(item, "select faults from tube.status()") == 0
    assert ["was given up" in line or "were given up" in line for line in maintain(item).attention] == [True]


def test_a_fault_of_a_capture_is_told_as_one_whatever_it_says(item):
    item.execute(
        "insert into tube.fault (tube, tbl, ids, message) values ('q', 'item', 1, 'control pod gone')"
    )
    assert one(item, "select faults from tube.attachments()") == 1
    (line,) = maintain(item).attention
    assert line.startswith("public.item: 1 statements whose ids")


CHANGES = [
    "drop table {0}",
    "alter table {0} rename to otherwise",
    "select tube.tube_table_ensure_detached('q', '{0}')",
    "drop table qs.{0}",
    "alter table {0} drop column id",
]


@pytest.mark.parametrize(
    "asks",
    ["truncate {}", "select tube.tube_backfill_schedule('q', 'id', 0, 0)"],
    ids=["truncate", "backfill"],
)
def test_a_dropped_or_changed_table_delays_no_other_table(db, item, asks):
    others = {f"other_{number}": change for number, change in enumerate(CHANGES)}
    for other in others:
        item.execute(
            f"create table {other} (id bigint primary key, day date); create table qs.{other} (id bigint primary key)"
        )
        attach(item, other)
    for other in others if "{}" in asks else ["all of them"]:
        item.execute(asks.format(other))
    assert len(controls(item)) >= len(others)
    for other, change in others.items():
        item.execute(change.format(other))
    item.execute("truncate item")
    work_off(FEED, db, copies(db))
    assert set(touched(item)) == {7}
    for _ in range(2):
        drain(item)
        work_off(FEED, db, copies(db))
    assert controls(item) == []


def test_a_control_pod_that_fails_for_now_stays_and_the_others_are_done(db, item):
    item.execute("create table other (id bigint primary key); create table qs.other (id bigint primary key)")
    attach(item, "other")
    item.execute("truncate other; truncate item")
    downstream = copies(db)

    def held(control: Control):
        if control.table == "public.other":
            raise RuntimeError("the search index is down")
        return downstream(control)

    with pytest.raises(RuntimeError, match="search index is down"):
        work_off(FEED, db, held)
    assert [payload["tbl"] for _, _, payload in controls(item)] == ["public.other"]
    assert touched(item) == [7]
    assert faults(item) == []
    drain(item)
    work_off(FEED, db, downstream)
    assert controls(item) == []


def test_a_callable_that_exits_keeps_no_other_from_being_done(db, item):
    put(item, {"type": "own"})
    item.execute("truncate item")

    def leaves(control: Control):
        if control.type == "own":
            raise SystemExit(3)
        return [7]

    with pytest.raises(SystemExit):
        work_off(FEED, db, leaves)
    assert [payload["type"] for _, _, payload in controls(item)] == ["own"]
    assert touched(item) == [7]


def test_a_result_that_is_no_list_of_ids_is_reported_and_touches_nothing(db, item):
    item.execute("truncate item")
    for given in ["12", b"12", 12, [2**63], [1.5], [True], [5, "x"], [[1]]]:
        named = given[-1] if isinstance(given, list) else given
        with pytest.raises(InvalidArgument, match=re.escape(f"{named!r} is not a")):
            work_off(FEED, db, lambda control, given=given: given)
        assert touched(item) == [], given
        assert len(controls(item)) == 1, given


@pytest.mark.parametrize(
    "given", [[5, None, -(2**63)], ["5", "-9223372036854775808"], (i for i in (5, -(2**63)))]
)
def test_ids_may_be_given_as_any_iterable_of_numbers(db, item, given):
    item.execute("truncate item")
    work_off(FEED, db, lambda control: given)
    assert touched(item) == [-(2**63), 5]


def test_touches_of_a_failing_control_pod_are_rolled_back(db, item, monkeypatch):
    monkeypatch.setattr("airflow_pgchange.tubes.control_pods.CHUNK", 1)
    item.execute("truncate item")

    def held(control: Control):
        yield 1
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        work_off(FEED, db, held)
    assert touched(item) == []
    assert len(controls(item)) == 1


def test_a_failing_control_pod_leaves_no_connection_open(db, item, role, monkeypatch):
    monkeypatch.setattr("airflow_pgchange.tubes.control_pods.CHUNK", 1)
    item.execute("truncate item; insert into qs.item values (8)")
    conninfo = worker(item, role, "select", "delete")
    with pytest.raises(PermissionDenied) as failed:
        work_off(FEED, conninfo, copies(conninfo))
    until(
        item,
        "select not exists (select from pg_stat_activity where usename like 'worker%' and datname = current_database())",
    )
    # A reference to the error could keep the connections open, so use the error only here.
    assert "permission denied" in str(failed.value)


def test_a_users_own_control_pod_is_handed_to_a_callable_downstream(db, item):
    put(item, {"type": "reindex", "how": "whole"})
    got = []
    done = work_off(
        FEED, db, lambda control: got.append((control.type, control.payload["how"], control.shard))
    )
    assert got == [("reindex", "whole", 0)]
    assert [one.given_up for one in done] == [None]
    assert controls(item) == []
    assert faults(item) == []


def test_a_callable_refuses_for_good_what_it_can_never_do(db, item):
    put(item, {"type": "reindex"})

    def never(control: Control):
        raise Refused("there is no index")

    (done,) = work_off(FEED, db, never)
    assert done.given_up == "there is no index"
    assert controls(item) == []


def test_a_worker_that_is_asked_to_stop_gives_up_and_fails_nothing(db, item):
    item.execute("truncate item")
    asked = []

    def held(control: Control):
        asked.append(True)
        return [1]

    with pytest.raises(Stopped):
        work_off(FEED, db, held, stopped=lambda: bool(asked))
    assert touched(item) == []
    assert len(controls(item)) == 1
    assert one(item, "select count(*) from tube.worker where control_failed_at is not null") == 0


def worker(item, role, *rights):
    who = role("worker")
    item.execute(
        f"select tube.grant_consumer('{who.name}'); grant select on item to {who.name};"
        f"grant usage on schema qs to {who.name}; grant select on qs.item to {who.name};"
        f"grant {', '.join(rights)} on q to {who.name}"
    )
    return who.conninfo


def test_a_worker_that_collects_needs_insert_on_the_pods_as_well(db, item, role):
    item.execute("truncate item")
    with pytest.raises(PermissionDenied, match="permission denied for table q"):
        work_off(FEED, conninfo := worker(item, role, "select", "delete"), copies(conninfo))
    assert len(controls(item)) == 1
    conninfo = worker(item, role, "select", "delete", "insert")
    work_off(FEED, conninfo, copies(conninfo))
    assert touched(item) == [7]
    assert controls(item) == []


def test_a_worker_carries_out_scheduled_backfills_and_gives_up_what_it_must(db, item, role):
    conninfo = worker(item, role, "select", "delete", "insert")
    item.execute("insert into item values (1)")
    drain(item)
    item.execute("select tube.tube_backfill_schedule('q', 'day', 0, 0)")
    put(item, {"type": "truncate", "tbl": "public.gone"})
    work_off(FEED, conninfo, copies(conninfo))
    assert pods(item) == [("B", 0, [1])]
    assert len(faults(item)) == 1


def test_a_copy_that_shares_its_name_with_no_other_needs_no_shard(db, item):
    """A template without a table's name names one copy for all tables.

    With two tables that copy needs a column for the shard.
    """
    item.execute("truncate item")
    work_off(FEED, db, TableDownstream(db, db, FEED, "qs.item"))
    assert touched(item) == [7]


def test_the_lowest_id_is_given_up_too(db, item):
    item.execute("insert into qs.item values (-9223372036854775808)")
    item.execute("truncate item")
    work_off(FEED, db, copies(db))
    assert touched(item) == [-9223372036854775808, 7]


def test_detaching_a_table_takes_its_control_pods_with_it(db, item):
    item.execute("truncate item")
    detach(item)
    (done,) = work_off(FEED, db, copies(db))
    assert "no table public.item is attached" in (done.given_up or "")
    assert controls(item) == []


def test_truncations_that_piled_up_ask_once_for_what_is_to_be_given_up(db, item):
    for _ in range(3):
        item.execute("truncate item")
    asked = []

    def downstream(control):
        asked.append(control.seq)
        return copies(db)(control)

    newest = item.execute("select max(seq) from q").fetchone()[0]
    assert len(work_off(FEED, db, downstream)) == 3
    assert asked == [newest]
    assert (touched(item), controls(item)) == ([7], [])


def test_truncations_of_other_tables_and_shards_are_each_asked_for(db, item):
    item.execute("create table other (id bigint primary key)")
    attach(item, "other")
    item.execute("truncate item; truncate other; truncate item")
    put(item, {"type": "truncate", "tbl": "public.item"})
    item.execute("select tube.touch('q', 1, '{}', 'T', %s)", ['{"type": "truncate", "tbl": "public.item"}'])
    asked = []

    def downstream(control):
        asked.append((control.table, control.shard))
        return []

    work_off(FEED, db, downstream)
    assert sorted(asked) == [("public.item", 0), ("public.item", 1), ("public.other", 0)]


def test_truncations_that_piled_up_are_asked_for_again_where_the_last_fails_for_now(db, item):
    for _ in range(3):
        item.execute("truncate item")

    def fails(control):
        raise ConnectionError("not now")

    with pytest.raises(ConnectionError, match="not now"):
        work_off(FEED, db, fails)
    work_off(FEED, db, copies(db))
    assert (touched(item), controls(item)) == ([7], [])
