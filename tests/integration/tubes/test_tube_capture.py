"""The statements that touch a tube."""

from __future__ import annotations

import pytest

from tests.tubes import attach, controls, detach, faults, make, one, pods, touched

PREDICATES = pytest.mark.parametrize("predicate", [None, "kind <> 'never'"])


def make_item(connection):
    connection.execute("create table item (id bigint primary key, kind text not null default 'a')")
    make(connection)
    attach(connection)


@pytest.fixture
def prepared_item():
    return make_item


def judged(connection, predicate):
    make(connection, predicate=predicate)
    return connection


def test_inserts_updates_and_deletes_touch_their_ids(item):
    item.execute("insert into item values (1), (2)")
    item.execute("update item set kind = 'b' where id = 2")
    item.execute("delete from item where id = 1")
    assert pods(item) == [("I", 0, [1, 2]), ("U", 0, [2]), ("D", 0, [1])]


def test_a_statement_that_changed_no_row_makes_no_pod(item):
    item.execute("update item set kind = 'b'")
    item.execute("delete from item")
    item.execute("insert into item select 1 where false")
    assert pods(item) == []


def test_a_changed_id_is_touched_before_and_after(item):
    item.execute("insert into item values (1)")
    item.execute("update item set id = 7")
    assert pods(item)[-1] == ("U", 0, [1, 7])


def test_a_write_that_is_rolled_back_touches_nothing(item):
    with item.transaction():
        item.execute("insert into item values (1)")
        item.execute("savepoint s")
        item.execute("insert into item values (2)")
        item.execute("rollback to s")
    assert touched(item) == [1]


def test_many_ids_are_sliced_into_pods(item):
    item.execute("insert into item select generate_series(1, 2000)")
    assert [len(ids) for _, _, ids in pods(item)] == [900, 900, 200]
    assert touched(item) == list(range(1, 2001))


def test_a_row_that_enters_or_leaves_the_predicate_is_touched_and_one_outside_is_not(item):
    judged(item, "kind = 'a'")
    item.execute("insert into item values (1, 'a'), (2, 'b')")
    item.execute("update item set kind = 'b' where id = 1")
    item.execute("update item set kind = 'c' where id = 1")
    item.execute("update item set kind = 'a' where id = 2")
    item.execute("delete from item where id = 1")
    assert pods(item) == [("I", 0, [1]), ("U", 0, [1]), ("U", 0, [2])]


def test_a_predicate_that_is_null_does_not_hold(item):
    judged(item, "nullif(kind, 'x') = 'a'")
    item.execute("insert into item values (1, 'x'), (2, 'a')")
    assert touched(item) == [2]


def test_a_row_for_which_the_predicate_fails_is_touched_and_counted_and_the_others_are_judged(item):
    judged(item, "12 / (id - 2) > 5")
    item.execute("insert into item values (1), (2), (3), (9)")
    assert touched(item) == [2, 3]
    assert faults(item) == [(1, "division by zero")]
    item.execute("update item set kind = 'b' where id < 3")
    assert faults(item)[1:] == [(2, "division by zero")]


def test_a_failed_assertion_in_a_predicate_does_not_fail_the_write(item):
    item.execute(
        "create function fits(kind text) returns boolean language plpgsql as "
        "$$ begin assert kind = 'a', 'does not fit'; return true; end $$"
    )
    judged(item, "public.fits(kind)")
    item.execute("insert into item values (1, 'a'), (2, 'b')")
    assert touched(item) == [1, 2]
    assert faults(item) == [(1, "does not fit")]


def test_a_changed_predicate_holds_at_once(item):
    judged(item, "id > 5")
    item.execute("insert into item values (1), (6)")
    judged(item, "")
    item.execute("insert into item values (2)")
    assert touched(item) == [2, 6]


@PREDICATES
def test_truncate_leaves_one_control_pod_that_names_the_table(connect, predicate):
    connection = connect()
    connection.execute("create schema sh0007")
    connection.execute("create table sh0007.p (id int primary key, kind text) partition by range (id)")
    connection.execute("create table sh0007.p1 partition of sh0007.p for values from (1) to (10)")
    connection.execute("create table sh0007.p2 partition of sh0007.p for values from (10) to (20)")
    make(connection, predicate=predicate)
    attach(connection, "sh0007.p", shard=None)
    connection.execute("truncate sh0007.p")
    expected = [("T", 7, {"type": "truncate", "tbl": "sh0007.p"})]
    assert controls(connection) == expected
    connection.execute("truncate sh0007.p1")
    assert controls(connection) == 2 * expected


def test_a_truncated_table_that_was_renamed_is_named_as_it_is_called_now(item):
    item.execute("alter table item rename to thing")
    item.execute("truncate thing")
    assert controls(item)[0][2]["tbl"] == "public.thing"


def test_a_backfill_s_session_touches_with_low_priority(item):
    item.execute("set application_name = 'nightly backfill 7'")
    item.execute("insert into item values (1)")
    item.execute("delete from item")
    assert [op for op, _, _ in pods(item)] == ["B", "B"]


def test_every_way_of_writing_touches_its_rows(item):
    item.execute("insert into item values (1), (2) on conflict do nothing")
    item.execute("insert into item values (2), (3) on conflict (id) do update set kind = 'b'")
    item.execute("with w as (insert into item values (4) returning id) insert into item select id + 1 from w")
    item.execute(
        "merge into item as t using (values (6::bigint), (1)) as s(id) on t.id = s.id "
        "when matched then delete when not matched then insert values (s.id)"
    )
    with item.cursor().copy("copy item from stdin") as copy:
        copy.write("8\ta\n")
    assert set(touched(item)) == {1, 2, 3, 4, 5, 6, 8}


def test_several_tubes_on_one_table_are_all_touched(item):
    make(item, "r", predicate="id > 5")
    attach(item, tube="r", shard=3)
    item.execute("insert into item values (1), (6)")
    assert pods(item, "q") == [("I", 0, [1, 6])]
    assert pods(item, "r") == [("I", 3, [6])]


def test_tables_and_tubes_whose_names_run_together_do_not_meet(connect):
    connection = connect()
    for table, tube in [("a", "b_c"), ("a_b", "c")]:
        connection.execute(f"create table {table} (id bigint primary key)")
        make(connection, tube)
        attach(connection, table, tube)
    connection.execute("insert into a values (1)")
    connection.execute("insert into a_b values (2)")
    assert touched(connection, "b_c") == [1]
    assert touched(connection, "c") == [2]


def test_a_shard_not_given_is_that_of_the_schema(connect):
    connection = connect()
    connection.execute("create schema sh0042")
    connection.execute("create table sh0042.item (id bigint primary key)")
    make(connection)
    attach(connection, "sh0042.item", shard=None)
    assert connection.execute("select tbl::text, shard from tube.tube_list()").fetchall() == [
        ("sh0042.item", 42)
    ]


def test_attached_again_with_another_shard_it_has_that(item):
    attach(item, shard=9)
    attach(item, shard=None)
    item.execute("insert into item values (1)")
    assert pods(item) == [("I", 9, [1])]


def test_triggers_have_the_names_that_users_know(item):
    rows = item.execute(
        "select tgname from pg_trigger where tgrelid = 'item'::regclass order by 1"
    ).fetchall()
    assert [name for (name,) in rows] == [
        f"item_q_after_{op}_trigger" for op in ("delete", "insert", "truncate", "update")
    ]


def test_a_detached_table_touches_nothing_and_detaching_again_is_nothing(item):
    item.execute("insert into item values (1)")
    detach(item)
    detach(item)
    item.execute("insert into item values (2)")
    assert touched(item) == [1]
    assert one(item, "select count(*) from pg_proc where proname like 'pgchange%'") == 0


def test_null_detaches_from_all_tubes(item):
    make(item, "r")
    attach(item, tube="r")
    detach(item, tube=None)
    item.execute("insert into item values (2)")
    assert touched(item) + touched(item, "r") == []


def test_a_removed_tube_lets_its_tables_go(item):
    item.execute("select tube.tube_ensure_absent('q')")
    item.execute("select tube.tube_ensure_absent('q')")
    item.execute("insert into item values (2)")
    assert item.execute("select tube from tube.tube_list()").fetchall() == []
    assert one(item, "select to_regclass('q')") is None


def test_a_table_that_was_renamed_and_moved_can_be_attached_again_and_detached(item):
    item.execute("create schema other")
    item.execute("alter table item rename to thing")
    item.execute("alter table thing set schema other")
    attach(item, "other.thing")
    item.execute("insert into other.thing values (1)")
    assert touched(item) == [1]
    detach(item, "other.thing")
    item.execute("insert into other.thing values (2)")
    assert touched(item) == [1]
    assert one(item, "select count(*) from pg_proc where proname like 'pgchange%'") == 0


def test_a_dropped_table_does_not_keep_its_tube_from_being_removed(item):
    item.execute("drop table item")
    item.execute("select tube.tube_ensure_absent('q')")
    assert one(item, "select count(*) from pg_proc where proname like 'pgchange_touch%'") == 0


@pytest.mark.parametrize("state", ["disable", "enable replica"])
def test_a_disabled_capture_is_named(item, state):
    item.execute(f"alter table item {state} trigger item_q_after_insert_trigger")
    assert one(item, "select disabled::text from tube.attachments()") == "{item}"
