"""Mutations of tables as events: their content, whatever was written and whatever the names of the columns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.mutations import events, faults, push, push_items, serialise, stop
from tests.tubes import one
from tests.waiting import until, waits


@pytest.fixture
def item(connect):
    """A table of which every mutation is published as an event."""
    return push_items(connect())


def test_an_insert_sends_the_row(item):
    item.execute("insert into item values (1, 'a', 5), (2, null, 6)")
    assert events(item) == [
        ("public.item.insert", {"id": 1, "kind": "a", "amount": 5}, {}),
        ("public.item.insert", {"id": 2, "kind": None, "amount": 6}, {}),
    ]


def test_a_delete_sends_the_row_that_was(item):
    item.execute("insert into item values (1, 'a', 5)")
    events(item)
    item.execute("delete from item")
    assert events(item) == [("public.item.delete", {"id": 1, "kind": "a", "amount": 5}, {})]


def test_an_update_sends_only_what_changed_and_the_row_as_it_was(item):
    item.execute("insert into item values (1, 'a', 5), (2, 'b', 6)")
    events(item)
    item.execute("update item set amount = amount + 1")
    assert events(item) == [
        ("public.item.update", {"amount": 6}, {"old": {"id": 1, "kind": "a", "amount": 5}}),
        ("public.item.update", {"amount": 7}, {"old": {"id": 2, "kind": "b", "amount": 6}}),
    ]


def test_an_update_to_null_is_sent(item):
    item.execute("insert into item values (1, 'a', 5)")
    events(item)
    item.execute("update item set kind = null")
    assert events(item) == [
        ("public.item.update", {"kind": None}, {"old": {"id": 1, "kind": "a", "amount": 5}})
    ]
    item.execute("update item set kind = 'b'")
    assert events(item)[0][1] == {"kind": "b"}


def test_an_update_that_changes_nothing_sends_nothing(item):
    item.execute("insert into item values (1, 'a', 5), (2, 'b', 6)")
    events(item)
    item.execute("update item set kind = 'a'")
    assert [payload for _, payload, _ in events(item)] == [{"kind": "a"}]
    item.execute("update item set amount = amount")
    item.execute("update item set amount = 1 where false")
    item.execute("delete from item where false")
    assert events(item) == []


def test_each_row_of_an_update_is_paired_with_itself(item):
    item.execute("insert into item select g, 'a', g from generate_series(1, 3000) as g")
    events(item)
    item.execute("update item set amount = -amount, id = id + 10000 where id % 3 > 0")
    sent = events(item)
    assert len(sent) == 2000
    assert all(
        payload == {"id": was["old"]["id"] + 10000, "amount": -was["old"]["id"]} for _, payload, was in sent
    )


def test_an_update_after_a_small_one_is_not_planned_as_small(item):
    item.execute("insert into item select g, 'a', g from generate_series(1, 20000) as g")
    for n in range(10):
        item.execute("update item set amount = 0 where id = %s", [n])
    item.execute("set statement_timeout = '30s'")
    item.execute("update item set amount = amount + 1")
    assert one(item, "select count(*) from pgmb.events where topic = 'public.item.update'") > 20000


@pytest.mark.parametrize(
    "names",
    [
        ["n", "o", "e", "old", "new", "s", "m", "p", "i", "a", "b"],
        ["tg_relid", "sqlerrm", "pgchange_row", "pgchange_open", "pgchange_added", "pgchange_removed"],
        [
            "record",
            "serialised",
            "emit",
            "op",
            "tabl",
            "tbl",
            "topic",
            "payload",
            "metadata",
            "after",
            "before",
        ],
        ["id", "select", "a b", "it's", 'q"q', "100%", "$body$", "Größe"],
    ],
)
def test_columns_may_have_any_name(connect, names):
    connection = connect()
    columns = sql.SQL(", ").join(sql.SQL("{} int").format(sql.Identifier(name)) for name in names)
    connection.execute(sql.SQL("create table item ({})").format(columns))
    push(connection)
    connection.execute(sql.SQL("insert into item ({}) values (1)").format(sql.Identifier(names[0])))
    connection.execute(sql.SQL("update item set {} = 2").format(sql.Identifier(names[1])))
    connection.execute("delete from item")
    before = dict.fromkeys(names) | {names[0]: 1}
    assert events(connection) == [
        ("public.item.insert", before, {}),
        ("public.item.update", {names[1]: 2}, {"old": before}),
        ("public.item.delete", before | {names[1]: 2}, {}),
    ]
    assert faults(connection) == []


def test_only_the_kinds_that_were_asked_for_are_sent_and_that_can_change(item):
    push(item, insert=False, update=False)
    item.execute("insert into item values (1, 'a', 5)")
    item.execute("update item set amount = 6")
    item.execute("delete from item")
    assert [topic for topic, _, _ in events(item)] == ["public.item.delete"]
    push(item, delete=False)
    item.execute("insert into item values (1, 'a', 5)")
    item.execute("delete from item")
    assert [topic for topic, _, _ in events(item)] == ["public.item.insert"]


def test_stopped_and_stopped_again_nothing_is_sent(item):
    stop(item)
    stop(item)
    item.execute("insert into item values (1, 'a', 5)")
    assert events(item) == []
    assert item.execute("select * from pgmb.pushed_table").fetchall() == []


def test_a_write_that_is_rolled_back_publishes_nothing(item):
    with pytest.raises(ZeroDivisionError), item.transaction():
        item.execute("insert into item values (1, 'a', 5)")
        raise ZeroDivisionError
    assert events(item) == []


def test_every_way_of_writing_publishes_events(item):
    item.execute("insert into item values (1), (2) on conflict do nothing")
    item.execute("insert into item values (2), (3) on conflict (id) do update set kind = 'b'")
    item.execute("with w as (insert into item values (4) returning id) insert into item select id + 1 from w")
    item.execute(
        "merge into item as t using (values (6::bigint), (1), (3)) as s(id) on t.id = s.id "
        "when matched and t.id = 1 then delete when matched then update set amount = 1 "
        "when not matched then insert values (s.id)"
    )
    with item.cursor().copy("copy item from stdin") as copy:
        copy.write("8\ta\t5\n")
    sent = [(topic.split(".")[2], (was.get("old") or payload)["id"]) for topic, payload, was in events(item)]
    expected = [("insert", n) for n in (1, 2, 3, 4, 5, 6, 8)]
    assert sorted(sent) == sorted([*expected, ("update", 2), ("update", 3), ("delete", 1)])


def test_the_owner_of_the_log_may_say_what_is_sent(item):
    serialise(item, "serialised := to_jsonb(record) - 'kind'; emit := (serialised ->> 'amount')::int > 5;")
    item.execute("insert into item values (1, 'secret', 5), (2, 'secret', 6)")
    item.execute("update item set kind = 'b'")
    item.execute("update item set amount = 1")
    assert events(item) == [
        ("public.item.insert", {"id": 2, "amount": 6}, {}),
        ("public.item.update", {"amount": 1}, {"old": {"id": 2, "amount": 6}}),
    ]


def test_a_row_that_cannot_be_serialised_does_not_fail_the_write_and_is_kept_for_later(item):
    failing = (
        "serialised := to_jsonb(record) || jsonb_build_object('x', 12 / (record.amount - 5)); emit := true;"
    )
    serialise(item, failing)
    item.execute("insert into item values (1, 'a', 5), (2, 'b', 6)")
    item.execute("update item set kind = 'c'")
    item.execute("delete from item")
    assert [topic for topic, _, _ in events(item)] == [
        f"public.item.{op}" for op in ("insert", "update", "delete")
    ]
    row = {"id": 1, "kind": "a", "amount": 5}
    assert faults(item) == [
        ("INSERT", "division by zero", None, row),
        ("UPDATE", "division by zero", row, row | {"kind": "c"}),
        ("DELETE", "division by zero", row | {"kind": "c"}, None),
    ]
    assert one(item, "select faults from pgmb.pushing()") == 3
    assert one(item, "select pgmb.replay_push_faults('item')") == 0
    serialise(item, "serialised := to_jsonb(record); emit := true;")
    assert one(item, "select pgmb.replay_push_faults('item')") == 3
    assert events(item) == [
        ("public.item.insert", row, {}),
        ("public.item.update", {"kind": "c"}, {"old": row}),
        ("public.item.delete", row | {"kind": "c"}, {}),
    ]
    assert faults(item) == []


def test_of_two_sessions_that_publish_a_row_after_all_at_once_one_does(item, connect):
    serialise(item, "raise exception 'no';")
    item.execute("insert into item values (1, 'a', 5)")
    serialise(item, "serialised := to_jsonb(record); emit := true;")
    first, second = connect(autocommit=False), connect()
    assert one(first, "select pgmb.replay_push_faults('item')") == 1
    with ThreadPoolExecutor() as pool:
        replayed = pool.submit(one, second, "select pgmb.replay_push_faults('item')")
        until(item, waits(second, behind=first))
        first.commit()
        assert replayed.result() == 0
    assert events(item) == [("public.item.insert", {"id": 1, "kind": "a", "amount": 5}, {})]


def test_a_row_that_is_none_of_the_table_by_now_keeps_no_other_from_being_published(item):
    serialise(item, "raise exception 'no';")
    item.execute("insert into item values (1, 'x', 1), (2, '7', 1)")
    item.execute("delete from item where id = 1")
    item.execute("alter table item alter kind type integer using kind::integer")
    serialise(item, "serialised := to_jsonb(record); emit := true;")
    assert one(item, "select pgmb.replay_push_faults('item')") == 1
    assert [(topic, row["id"], row["kind"]) for topic, row, _ in events(item)] == [
        ("public.item.insert", 2, 7)
    ]
    assert [(op, (before or after)["id"]) for op, _, before, after in faults(item)] == [
        ("INSERT", 1),
        ("DELETE", 1),
    ]


def test_a_failed_assertion_in_a_serialisation_does_not_fail_the_write(item):
    serialise(item, "assert record.amount > 5, 'too small';")
    item.execute("insert into item values (1, 'a', 5)")
    assert faults(item)[0][1] == "too small"


def test_capture_costs_no_second_transaction_id(item):
    with item.transaction():
        item.execute("insert into item values (1, 'a', 5)")
        item.execute("update item set amount = 6")
        writers = item.execute("select distinct xmin::text from pgmb.events").fetchall()
        assert writers == [(one(item, "select pg_current_xact_id()::xid::text"),)]


def test_a_captured_transaction_can_be_prepared(item):
    with item.transaction():
        item.execute("insert into item values (1, 'a', 5)")
        item.execute("prepare transaction 'captured'")
    item.execute("commit prepared 'captured'")
    assert len(events(item)) == 1


def test_a_log_that_somebody_dropped_by_hand_does_not_fail_a_write(item):
    item.execute("drop schema pgmb cascade")
    for statement in ("insert into item values (1)", "update item set amount = 1", "delete from item"):
        item.execute(statement)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": 1, "y": 2}, {"x": 1, "y": 2}, None),
        ({"x": 1, "y": 2}, {"x": 1, "y": 3}, {"y": 2}),
        ({"x": 1, "y": None}, {"x": 1, "y": 3}, {"y": None}),
        ({"x": 1, "y": None}, {"x": 1}, {"y": None}),
        ({"x": 1}, {"x": 1, "y": 2}, {"y": None}),
        ({"x": {"deep": 1}}, {"x": {"deep": 2}}, {"x": {"deep": 1}}),
        ({}, {}, None),
        ([1], [2], [1]),
        ([1], [1], None),
        (5, {"x": 1}, 5),
    ],
)
def test_a_difference_is_what_one_value_has_and_the_other_has_not(connect, a, b, expected):
    assert one(connect(), "select pgmb.jsonb_diff(%s, %s)", Jsonb(a), Jsonb(b)) == expected
