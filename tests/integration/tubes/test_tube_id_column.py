"""The column that holds a table's ids, whatever happens to the table."""

from __future__ import annotations

import itertools

import pytest

from tests import dumps
from tests.tube_writers import make_owner
from tests.tubes import attach, begin, faults, make, one, pods, run, steps, touched

PREDICATES = pytest.mark.parametrize("predicate", [None, "kind <> 'never'"])
SWAP = (
    "begin; alter table item drop constraint item_pkey; alter table item rename id to id_old; "
    "alter table item rename id_new to id; alter table item alter id_old set default -1; "
    "alter table item add primary key (id); commit"
)


def swapped(connection, predicate=None):
    """A table whose integer ids became bigint by the usual way without a rewrite."""
    connection.execute("create table item (id int primary key, kind text not null default 'a')")
    make(connection, predicate=predicate)
    attach(connection)
    connection.execute("alter table item add column id_new bigint not null default 0")
    connection.execute(SWAP)
    return connection


@PREDICATES
@pytest.mark.parametrize("mended", [False, True])
def test_a_column_that_took_the_place_of_the_ids_holds_them(connect, predicate, mended):
    connection = swapped(connect(), predicate)
    if mended:
        connection.execute("select tube.recapture()")
    connection.execute("insert into item (id) values (5000000000)")
    connection.execute("update item set kind = 'b'")
    connection.execute("delete from item")
    assert touched(connection) == [5000000000] * 3
    (attached,) = one(connection, "select tube.attached_to('q', 1, 0)")
    assert (attached["name"], attached["key"]) == ("item", ["id"])
    assert faults(connection) == []


@PREDICATES
def test_a_repeatable_read_transaction_touches_ids_by_the_name_that_their_column_has_now(connect, predicate):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n bigint, kind text not null default 'a')")
    make(connection, predicate=predicate)
    attach(connection)
    writer = connect(autocommit=False)
    writer.execute("set transaction isolation level repeatable read")
    writer.execute("select from tube.attachment")
    connection.execute("alter table item rename id to old_id; alter table item rename n to id")
    writer.execute("insert into item (old_id, id) values (1, 777)")
    writer.commit()
    assert touched(connection) == [1]
    assert faults(connection) == []


@PREDICATES
@pytest.mark.parametrize("key", ["primary key", "not null"])
def test_ids_that_were_renamed_are_touched_though_another_column_got_their_name(connect, predicate, key):
    connection = connect()
    connection.execute(f"create table item (id bigint {key}, kind text not null default 'a')")
    make(connection, predicate=predicate)
    attach(connection, group_by=["id"])
    for _ in range(10):  # After five executions PostgreSQL may keep a generic plan.
        connection.execute("insert into item values (1); delete from item")
    connection.execute("truncate q; truncate item")
    connection.execute("alter table item rename id to old_id; alter table item add id bigint default 7")
    connection.execute("insert into item (old_id) values (1)")
    assert one(connection, "select stale from tube.attachments()") is True
    connection.execute("select tube.recapture()")
    connection.execute("update item set kind = 'b'; delete from item")
    assert set(touched(connection)) == {1}
    assert faults(connection) == []
    assert one(connection, "select stale from tube.attachments()") is False


@pytest.mark.parametrize(
    ("ddl", "severity", "told"),
    [
        ("alter table item drop column id", "error", "id, was dropped"),
        ("alter table item alter id type numeric", "error", "id, is numeric now"),
        (
            "alter table item drop constraint item_pkey; alter table item alter id drop not null",
            "warning",
            "id, can be null",
        ),
    ],
)
def test_a_column_that_holds_the_ids_of_all_rows_no_more_is_told(connect, ddl, severity, told):
    connection = connect()
    connection.execute("create table item (id bigint primary key, kind text)")
    make(connection)
    attach(connection)
    connection.execute(ddl)
    findings = connection.execute("select severity, told from tube.health()").fetchall()
    assert severity in [how for how, what in findings if f"its column of ids, {told}" in what]


def test_attached_tables_come_by_shard_then_by_schema_and_name(connect):
    connection = connect()
    make(connection)
    for table, shard in (("b.item", 1), ("a.thing", 1), ("a.zone", 0)):
        schema, _, _ = table.partition(".")
        connection.execute(
            f"create schema if not exists {schema}; create table {table} (id bigint primary key)"
        )
        attach(connection, table, shard=shard)
    found = one(connection, "select tube.attached_to('q', 1, 0)")
    told = [(each["shard"], each["schema"], each["name"]) for each in found]
    assert told == [(0, "a", "zone"), (1, "a", "thing"), (1, "b", "item")]
    listed = connection.execute("select tbl::text from tube.tube_list()").fetchall()
    assert listed == [("a.zone",), ("a.thing",), ("b.item",)]


def test_after_such_a_swap_a_rename_is_followed_again(connect):
    connection = swapped(connect())
    assert one(connection, "select stale from tube.attachments()") is True
    connection.execute("select tube.recapture()")
    assert one(connection, "select stale from tube.attachments()") is False
    connection.execute("alter table item rename id to number")
    connection.execute("insert into item (number) values (7)")
    assert touched(connection) == [7]


def test_a_restored_dump_touches_by_the_same_column(db, bare_db, connect_to, cluster):
    """A tube without a predicate, and a tube with a predicate, touch the same column as before the dump."""
    connection = connect_to(db)
    connection.execute(
        "create table item (gone text, id bigint primary key, other bigint not null, kind text default 'a')"
    )
    connection.execute("alter table item drop column gone")
    for tube, predicate in (("q", None), ("judged", "kind <> 'never'")):
        make(connection, tube, predicate=predicate)
        attach(connection, tube=tube)
    dumps.load(cluster, bare_db, dumps.dump(cluster, db))
    restored = connect_to(bare_db)
    restored.execute("insert into item values (3, 300)")
    restored.execute("select tube.recapture()")
    restored.execute("insert into item values (4, 400)")
    assert touched(restored, "q") == [3, 4]
    assert touched(restored, "judged") == [3, 4]


def test_a_fault_is_noted_where_a_session_has_turned_row_security_off(connect, role, connect_to):
    connection = connect()
    session = connect_to(make_owner(connection, role).conninfo)
    session.execute("set search_path = own; alter table item drop column id; set row_security = off")
    session.execute("insert into item values ('a')")
    assert [count for count, _ in faults(connection)] == [1]


LOOSE = "create table item (id bigint, day date, kind text not null default 'a')"


@PREDICATES
def test_rows_without_an_id_are_passed_over_by_the_capture(connect, predicate):
    connection = connect()
    connection.execute(LOOSE)
    make(connection, predicate=predicate)
    attach(connection, group_by=["id"])
    connection.execute("insert into item (id) values (null)")
    connection.execute("insert into item (id) values (1), (null), (2)")
    connection.execute("update item set id = 3 where id is null")
    connection.execute("update item set id = null where id = 2")
    connection.execute("delete from item")
    assert [ids for _, _, ids in pods(connection)] == [[1, 2], [3], [2], [1, 3, 3]]
    assert faults(connection) == []


def test_rows_without_an_id_are_no_fault_where_each_row_is_taken_by_itself(connect):
    connection = connect()
    connection.execute(LOOSE)
    make(connection, predicate="1 / length(kind) > 0")
    attach(connection, group_by=["id"])
    connection.execute("insert into item (id, kind) values (1, 'a'), (2, ''), (null, 'a')")
    assert touched(connection) == [1, 2]
    assert [count for count, _ in faults(connection)] == [1]


@PREDICATES
def test_rows_without_an_id_are_passed_over_by_a_backfill(connect, predicate):
    """No row is missed, in any order and with any size of chunks."""
    connection = connect()
    connection.execute(LOOSE)
    connection.execute(
        "insert into item select case when g % 3 > 0 then g end, case when g % 2 > 0 then date '2024-01-01' + g / 4 end "
        "from generate_series(1, 12) as g"
    )
    make(connection, predicate=predicate)
    attach(connection, group_by=["id"])
    for order_col, chunk_size in itertools.product(["id", "day", "kind"], [1, 2, 100]):
        steps(connection, order_col=order_col, fetch=chunk_size)
        assert touched(connection) == [1, 2, 4, 5, 7, 8, 10, 11], (order_col, chunk_size)
        connection.execute("delete from q")
        run(connection, begin(connection, order_col=order_col, chunk_size=chunk_size))
        assert touched(connection) == [1, 2, 4, 5, 7, 8, 10, 11], (order_col, chunk_size)
        connection.execute("delete from q")


def test_a_shard_that_is_not_given_is_that_of_the_schemas_name_or_else_of_the_tables(q):
    q.execute("create schema sh0012; create schema plain; create schema big99999999999")
    shards = {"sh0012.item": 12, "sh0012.item7": 12, "plain.item7": 7, "big99999999999.item_3": 3}
    for table in shards:
        q.execute(f"create table {table} (id bigint primary key)")
        attach(q, table, shard=None)
    assert dict(q.execute("select tbl::text, shard from tube.tube_list()").fetchall()) == shards
