"""Touching ids by SQL."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.tubes import attach, controls, make, one, pods, touched
from tests.waiting import until, waits


def make_item(connection):
    connection.execute("create table item (id bigint primary key)")
    make(connection)
    attach(connection, shard=3)


@pytest.fixture
def prepared_item():
    return make_item


def test_a_tubes_own_function_touches_a_shard(item):
    item.execute("select q_touch(8, array[1, 2, 3], 'U', chunk_size => 2)")
    assert pods(item) == [("U", 8, [1, 2]), ("U", 8, [3])]


def test_a_tables_own_function_touches_every_tube_that_it_is_attached_to(item):
    make(item, "r")
    attach(item, tube="r", shard=4)
    item.execute("select item_touch(array[1, 2])")
    assert pods(item, "q") == [("T", 3, [1, 2])]
    assert pods(item, "r") == [("T", 4, [1, 2])]


def test_a_payload_goes_with_the_ids(item):
    item.execute("""select item_touch(array[1, 2], payload => '{"why": "x"}', chunk_size => 1)""")
    assert item.execute("select payload from q").fetchall() == [({"why": "x"},), ({"why": "x"},)]


def test_a_payload_without_ids_is_a_control_pod(item):
    item.execute(
        """select q_touch(3, '{}', 'T', '{"type": "mine"}'), q_touch(3, null, 'B', '{"type": "other"}')"""
    )
    assert controls(item) == [("T", 3, {"type": "mine"}), ("B", 3, {"type": "other"})]


def test_neither_ids_nor_payload_is_nothing(item):
    item.execute("select q_touch(3, '{}', 'T'), item_touch(null), item_touch(array[null]::bigint[])")
    assert pods(item) + controls(item) == []


def test_an_array_may_begin_at_any_number(item):
    item.execute("select q_touch(3, '[0:2]={1,2,3}', 'T'), item_touch('[5:6]={4,5}')")
    assert touched(item) == [1, 2, 3, 4, 5]


def test_in_a_backfill_s_session_touches_have_low_priority(item):
    item.execute("set application_name = 'backfill'")
    item.execute("select item_touch(array[1])")
    assert pods(item) == [("B", 3, [1])]


def test_a_table_attached_to_nothing_has_no_function(item):
    item.execute("select tube.tube_table_ensure_detached(null, 'item')")
    assert one(item, "select count(*) from pg_proc where proname = 'item_touch'") == 0


def test_a_pod_holds_what_a_page_holds(item):
    item.execute("select q_touch(3, array(select generate_series(1, 5000)), 'T', chunk_size => 100000)")
    assert max(len(ids) for _, _, ids in pods(item)) == 900
    assert touched(item) == list(range(1, 5001))


def test_the_result_of_a_query_is_touched_in_its_order(item):
    item.execute("set search_path = public, pg_temp")
    item.execute("create temporary table wanted as select g from generate_series(1, 1000) as g")
    item.execute(
        "select tube.tube_pods_insert('q', 'select g, row_number() over () from wanted order by g desc; ', 3, "
        "fetch_chunk_size => 300, insert_chunk_size => 100)"
    )
    assert [(op, shard, len(ids)) for op, shard, ids in pods(item)] == [("B", 3, 100)] * 10
    assert one(item, "select ids[1] from q order by seq limit 1") == 1000
    assert touched(item) == list(range(1, 1001))


def test_a_query_may_touch_several_tubes_and_gives_the_kind_and_skips_nulls(item):
    make(item, "r")
    item.execute("select tube.tube_pods_insert('q, r', 'values (1, 1), (null, 2), (3, 3)', 5, 'T', 3)")
    assert pods(item, "q") == pods(item, "r") == [("T", 5, [1, 3])]


def test_an_empty_query_touches_nothing(item):
    item.execute("select tube.tube_pods_insert('q', 'select 1, 2 where false', 5)")
    assert pods(item) == []


def test_a_touch_by_hand_during_a_change_of_shard_is_under_the_old_shard_and_before_it(item, connect):
    toucher = connect(autocommit=False)
    toucher.execute("select item_touch(array[1])")
    done = threading.Event()

    def move():
        attach(connect(), shard=4)
        done.set()

    thread = threading.Thread(target=move)
    thread.start()
    until(item, waits(kind="advisory"))
    assert not done.is_set()
    toucher.commit()
    thread.join()
    item.execute("select item_touch(array[1])")
    assert [shard for _, shard, _ in pods(item)] == [3, 4, 4]
    assert one(
        item, "select upto > (select min(seq) from q) and upto < (select max(seq) from q) from tube.moved"
    )


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_transaction_that_does_not_see_a_change_of_shard_is_to_be_repeated(item, connect, level):
    toucher = connect()
    with pytest.raises(psycopg.errors.SerializationFailure), toucher.transaction():
        toucher.execute(f"set transaction isolation level {level}")
        toucher.execute("select from item")
        attach(item, shard=4)
        toucher.execute("select item_touch(array[1])")
    assert pods(item) == []
    with toucher.transaction():
        toucher.execute(f"set transaction isolation level {level}")
        toucher.execute("select item_touch(array[1])")
    assert pods(item) == [("T", 4, [1])]


@pytest.mark.parametrize("tubes", ["q, q", "{q,q}"])
def test_a_tube_that_is_named_twice_is_touched_once(item, tubes):
    item.execute("select tube.tube_pods_insert(%s, 'select 1', 0)", [tubes])
    assert touched(item) == [1]


def test_tubes_may_be_given_as_the_text_of_an_array(item):
    make(item, "with blank")
    item.execute("select tube.tube_pods_insert(array['q', 'with blank']::text, 'select 1', 0)")
    assert (touched(item), touched(item, '"with blank"')) == ([1], [1])


@pytest.mark.parametrize("query", [None, "", " ;\r\n"])
def test_a_touch_by_no_query_is_refused(item, query):
    with pytest.raises(psycopg.Error, match="needs a query"):
        item.execute("select tube.tube_pods_insert('q', %s, 0)", [query])


@pytest.mark.parametrize("tubes", ["", " ", "{}"])
def test_a_touch_of_many_ids_in_no_tube_is_refused(item, tubes):
    with pytest.raises(psycopg.Error, match="no tube is named"):
        item.execute("select tube.tube_pods_insert(%s, 'select 1', 0)", [tubes])


@pytest.mark.parametrize(
    "change", ["alter table item rename to thing", "create schema his; alter table item set schema his"]
)
def test_a_table_that_got_another_name_leaves_no_function_when_it_is_detached(item, change):
    item.execute("create table kept (id bigint primary key)")
    attach(item, "kept")
    number = one(item, "select 'item'::regclass::oid")
    item.execute(change)
    item.execute("select tube.tube_table_ensure_detached('q', %s::oid)", [number])
    assert item.execute(
        "select proname from pg_proc where proname ~ '^(item|thing|kept)_touch'"
    ).fetchall() == [("kept_touch",)]
