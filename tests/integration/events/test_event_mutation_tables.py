"""The tables whose mutations can be published, and the effect of later changes of such a table."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from tests.limits import shorten_locks
from tests.mutations import events, push, push_items, stop
from tests.tubes import one


@pytest.fixture
def item(connect):
    """A table of which every mutation is published as an event."""
    return push_items(connect())


@pytest.mark.parametrize("name", ["it's", "100%", 'a "b"', "$body$", "Größe", "select", "x" * 63])
def test_tables_and_schemas_may_have_any_name(connect, name):
    connection = connect()
    table = sql.SQL("{0}.{0}").format(sql.Identifier(name))
    connection.execute(sql.SQL("create schema {}").format(sql.Identifier(name)))
    connection.execute(sql.SQL("create table {} (id int)").format(table))
    push(connection, table.as_string(connection))
    connection.execute(sql.SQL("insert into {} values (1)").format(table))
    connection.execute(sql.SQL("update {} set id = 2").format(table))
    assert [topic for topic, _, _ in events(connection)] == [
        f"{name}.{name}.insert".lower(),
        f"{name}.{name}.update".lower(),
    ]
    stop(connection, table.as_string(connection))
    connection.execute(sql.SQL("insert into {} values (1)").format(table))
    assert events(connection) == []
    assert one(connection, "select count(*) from pg_proc where proname like 'pgchange\\_push%'") == 0


def test_partitions_are_captured_through_the_parent_and_by_themselves(connect):
    connection = connect()
    connection.execute("create table item (id int, day int, kind text) partition by range (day)")
    # A partition may have its columns in another order than its parent.
    connection.execute("create table p1 (kind text, gone int, day int, id int)")
    connection.execute("alter table p1 drop column gone")
    connection.execute("alter table item attach partition p1 for values from (1) to (10)")
    push(connection)
    connection.execute("insert into item values (1, 1, 'a')")
    connection.execute("insert into p1 (id, day, kind) values (2, 2, 'a')")
    connection.execute("update p1 set kind = 'b' where id = 1")
    assert [(topic, payload) for topic, payload, _ in events(connection)] == [
        ("public.item.insert", {"id": 1, "day": 1, "kind": "a"}),
        ("public.item.insert", {"id": 2, "day": 2, "kind": "a"}),
        ("public.item.update", {"kind": "b"}),
    ]


MERGE = (
    "merge into item as t using (values (1), (2), (11), (12)) as s(id) on t.id = s.id "
    "when matched then update set kind = 'b' when not matched then insert values (s.id, 'c')"
)


@pytest.fixture
def merged(connect):
    connection = connect()
    connection.execute(
        "create table item (id int primary key, kind text) partition by range (id);"
        "create table p1 partition of item for values from (1) to (10);"
        "create table p2 partition of item for values from (10) to (20)"
    )
    connection.execute("insert into item values (2, 'a'), (12, 'a')")
    push(connection)
    return connection


def updates(connection):
    return [
        (was["old"]["id"], payload)
        for topic, payload, was in events(connection)
        if topic == "public.item.update"
    ]


def test_updates_of_a_merge_that_also_inserts_into_partitions_are_published_correctly(merged):
    """In an upsert PostgreSQL passes triggers the row that was inserted last, instead of each row that is updated after
    it."""
    merged.execute(MERGE)
    assert updates(merged) == [(2, {"kind": "b"}), (12, {"kind": "b"})]


def test_a_lost_guard_of_a_partitioned_table_is_told_and_mended(merged):
    merged.execute(
        sql.SQL("drop trigger {} on item").format(
            sql.Identifier(one(merged, "select pgmb.push_guard('item')"))
        )
    )
    assert one(merged, "select stale from pgmb.pushing()")
    assert (
        one(merged, "select * from pgmb.recapture()")
        == "public.item: the capture of its mutations was repaired"
    )
    assert not one(merged, "select stale from pgmb.pushing()")
    merged.execute(MERGE)
    assert updates(merged) == [(2, {"kind": "b"}), (12, {"kind": "b"})]


def test_a_trigger_that_is_called_like_the_guard_does_not_take_its_place(merged, role):
    stop(merged)
    merged.execute(
        "create function nothing() returns trigger language plpgsql as 'begin return null; end'; "
        "create trigger pgmb_push_guard_000000000000 after delete on item for each statement execute function nothing()"
    )
    push(merged)
    merged.execute(MERGE)
    assert updates(merged) == [(2, {"kind": "b"}), (12, {"kind": "b"})]
    stop(merged)
    assert merged.execute("select tgname from pg_trigger where tgrelid = 'item'::regclass").fetchall() == [
        ("pgmb_push_guard_000000000000",)
    ]


def test_the_capture_of_a_former_owner_is_told_and_placed_anew(merged, role):
    owner = role("heir")
    merged.execute(f"grant create on schema public to {owner.name}")
    merged.execute("select pgmb.grant_owner(%s)", [owner.name])
    merged.execute(f"alter table item owner to {owner.name}")
    mend = "select pgmb.recapture()"
    assert one(merged, "select stale from pgmb.pushing()")
    merged.execute(mend)
    assert not one(merged, "select stale from pgmb.pushing()")
    of_others = (
        "select count(*) from pg_trigger as t join pg_proc as f on f.oid = t.tgfoid "
        "join pg_class as c on c.oid = t.tgrelid where c.relname like 'item%' and f.proowner <> c.relowner "
        "and t.tgparentid = 0 and t.tgname like 'pgmb%' and f.pronamespace <> 'pg_catalog'::regnamespace"
    )
    assert one(merged, of_others) == 0
    merged.execute(MERGE)
    assert updates(merged) == [(2, {"kind": "b"}), (12, {"kind": "b"})]


@pytest.mark.parametrize("halt", [stop, lambda connection: push(connection, update=False)])
def test_a_partitioned_table_keeps_no_guard_when_its_updates_are_not_sent(merged, halt):
    halt(merged)
    assert one(merged, "select count(*) from pg_trigger where tgname like 'pgmb\\_push\\_guard%'") == 0
    assert one(merged, "select count(*) from pg_proc where proname like 'pgchange\\_push%update%'") == 0


@pytest.fixture
def parts(connect):
    connection = connect()
    connection.execute("create table item (id int, day int, primary key (id, day)) partition by range (day)")
    connection.execute("create table p1 partition of item for values from (1) to (10)")
    connection.execute("create table p2 partition of item for values from (10) to (20)")
    push(connection)
    return connection


def test_a_row_that_moves_to_another_partition_is_an_update(parts):
    parts.execute("insert into item values (1, 1), (2, 2)")
    events(parts)
    parts.execute("update item set day = day + 10 where id = 2")
    assert events(parts) == [("public.item.update", {"day": 12}, {"old": {"id": 2, "day": 2}})]


def test_rows_that_cannot_be_paired_are_sent_whole(parts):
    parts.execute(
        "create function swallow() returns trigger language plpgsql as $$ begin "
        "if new.id = 1 then return null; end if; return new; end $$"
    )
    parts.execute("create trigger swallow before insert on p2 for each row execute function swallow()")
    parts.execute("insert into item values (1, 1), (2, 2), (3, 3)")
    events(parts)
    parts.execute("update item set day = day + 10")
    assert sorted(payload["id"] for _, payload, _ in events(parts)) == [2, 3]
    assert one(parts, "select count(*) from item") == 2


def test_a_partition_that_came_later_is_named_and_then_captured(parts):
    parts.execute("create table p3 partition of item for values from (20) to (30)")
    assert one(parts, "select untriggered::text from pgmb.pushing()") == "{p3}"
    assert "repaired" in one(parts, "select pgmb.recapture()")
    parts.execute("insert into p3 values (1, 20)")
    assert len(events(parts)) == 1
    assert parts.execute("select pgmb.recapture()").fetchall() == []


def test_a_partition_that_left_is_captured_no_more(parts):
    parts.execute("alter table item detach partition p1")
    assert one(parts, "select stale from pgmb.pushing()") is True
    parts.execute("select pgmb.recapture()")
    assert one(parts, "select stale from pgmb.pushing()") is False
    parts.execute("insert into p1 values (1, 1)")
    assert events(parts) == []


def test_a_table_with_a_partition_that_left_can_be_stopped(parts):
    parts.execute("alter table item detach partition p1")
    stop(parts)
    parts.execute("insert into p1 values (1, 1)")
    assert events(parts) == []
    assert one(parts, "select count(*) from pg_proc where proname like 'pgchange\\_push%'") == 0


def test_a_column_that_came_later_is_sent_and_one_that_went_is_not(item):
    item.execute("insert into item values (1, 'a', 5)")
    item.execute("alter table item add column more int default 7")
    item.execute("alter table item drop column kind")
    item.execute("update item set more = 8")
    assert events(item)[1:] == [
        ("public.item.update", {"more": 8}, {"old": {"id": 1, "amount": 5, "more": 7}})
    ]


def test_a_renamed_table_is_named_stale_and_mended(item):
    item.execute("alter table item rename to thing")
    assert one(item, "select stale from pgmb.pushing()") is True
    item.execute("select pgmb.recapture()")
    item.execute("insert into thing values (1)")
    assert events(item)[0][0] == "public.thing.insert"
    assert item.execute("select pgmb.recapture()").fetchall() == []


def test_a_disabled_capture_is_named(item):
    item.execute("alter table item disable trigger pgmb_push_update")
    assert one(item, "select disabled::text from pgmb.pushing()") == "{item}"


def test_a_table_that_cannot_be_captured_is_refused(connect):
    connection = connect()
    connection.execute(
        "create view seen as select 1 as id; create temporary table passing (id int);"
        "create table whole (id int) partition by range (id); create table part partition of whole default"
    )
    for table, reason in {
        "seen": "is not a table",
        "passing": "is a temporary table",
        "part": "is a partition",
        "pgmb.config": "is not a table of your own",
    }.items():
        with pytest.raises(psycopg.Error, match=reason) as refused:
            push(connection, table)
        assert refused.value.sqlstate == "PC008", table


def test_to_publish_nothing_is_refused(item):
    with pytest.raises(psycopg.Error, match="no mutation of public.item"):
        push(item, insert=False, update=False, delete=False)


def test_a_capture_does_not_wait_long_for_writers(item, connect):
    item.execute("create table busy (id int)")
    writer = connect(autocommit=False)
    writer.execute("insert into busy values (1)")
    shorten_locks(item)
    with pytest.raises(psycopg.errors.LockNotAvailable, match="is being written by transactions"):
        push(item, "busy")


@pytest.mark.parametrize("dropped_by_hand", [[], ["insert", "delete", "update"]])
def test_the_end_of_a_capture_does_not_wait_long_for_writers(item, connect, dropped_by_hand):
    """The call does not wait either if only triggers remain that never fire."""
    item.execute(
        "create table busy (id int) partition by list (id); create table one partition of busy default"
    )
    push(item, "busy")
    for op in dropped_by_hand:
        item.execute(f"drop trigger pgmb_push_{op} on busy; drop trigger pgmb_push_{op} on one")
    writer = connect(autocommit=False)
    writer.execute("insert into busy values (1)")
    shorten_locks(item)
    item.execute("set statement_timeout = '15s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="is being (used|written) by transactions"):
        item.execute("select pgmb.stop_table_mutations_push('busy')")
