"""The capture of partitioned tables, and of ids and columns of any type and name."""

from __future__ import annotations

import psycopg
import pytest

from tests.tubes import attach, detach, faults, make, one, pods, touched

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


@PREDICATES
def test_partitions_are_captured_through_the_parent_and_by_themselves(connect, predicate):
    connection = connect()
    connection.execute("create table item (id int, day int, kind text) partition by range (day)")
    # A partition may have its columns in another order than its parent.
    connection.execute("create table p1 (kind text, gone int, day int, id int not null)")
    connection.execute("alter table p1 drop column gone")
    connection.execute("alter table item alter id set not null")
    connection.execute("alter table item attach partition p1 for values from (1) to (10)")
    make(connection, predicate=predicate)
    attach(connection, group_by=["id"])
    connection.execute("insert into item values (1, 1, 'a')")
    connection.execute("insert into p1 (id, day, kind) values (2, 2, 'a')")
    assert touched(connection) == [1, 2]


@PREDICATES
def test_a_row_that_moves_to_another_partition_is_touched(connect, predicate):
    connection = connect()
    connection.execute(
        "create table item (id int, day int, kind text, primary key (id, day)) partition by range (day)"
    )
    connection.execute("create table p1 partition of item for values from (1) to (10)")
    connection.execute("create table p2 partition of item for values from (10) to (20)")
    make(connection, predicate=predicate)
    attach(connection, group_by=["id"])
    connection.execute("insert into item values (1, 1, 'a')")
    connection.execute("update item set day = 11")
    assert set(touched(connection)) == {1}
    assert len(pods(connection)) >= 2


@pytest.mark.parametrize("predicate", [None, "kind = 'b'"])
def test_updates_of_a_merge_that_also_inserts_into_partitions_are_touched(connect, predicate):
    """In an upsert PostgreSQL passes triggers the row that was inserted last, instead of each row that is updated after
    it."""
    connection = connect()
    connection.execute(
        "create table item (id int primary key, kind text) partition by range (id);"
        "create table p1 partition of item for values from (1) to (10);"
        "create table p2 partition of item for values from (10) to (20)"
    )
    connection.execute("insert into item values (2, 'a'), (12, 'a')")
    make(connection, predicate=predicate)
    attach(connection)
    connection.execute(
        "merge into item as t using (values (1), (2), (11), (12)) as s(id) on t.id = s.id "
        "when matched then update set kind = 'b' when not matched then insert values (s.id, 'c')"
    )
    assert set(touched(connection)) >= {2, 12}
    assert pods_of_updates(connection) == {2, 12}


def test_a_lost_guard_of_a_partitioned_table_is_told_and_mended(connect):
    connection = connect()
    connection.execute(
        "create table item (id int primary key) partition by range (id);"
        "create table p1 partition of item for values from (1) to (10)"
    )
    make(connection)
    attach(connection)
    guard = one(
        connection, "select tgname from pg_trigger where tgrelid = 'p1'::regclass and tgparentid <> 0"
    )
    connection.execute(f"drop trigger {guard} on item")
    assert one(connection, "select untriggered::text from tube.attachments()") == "{item,p1}"
    connection.execute("select tube.recapture()")
    assert one(connection, "select untriggered::text from tube.attachments()") == "{}"
    assert one(connection, "select count(*) from pg_trigger where tgname = %s", guard) == 2


def pods_of_updates(connection):
    return {each for op, _, ids in pods(connection) if op == "U" for each in ids}


def test_a_partitioned_table_is_left_without_a_trigger(connect):
    connection = connect()
    connection.execute(
        "create table item (id int primary key) partition by range (id);"
        "create table p1 partition of item for values from (1) to (10) partition by range (id);"
        "create table p11 partition of p1 for values from (1) to (5);"
        "create table p2 partition of item for values from (10) to (20)"
    )
    make(connection)
    attach(connection)
    connection.execute("alter table item detach partition p2")
    connection.execute("create table p3 partition of item for values from (10) to (30)")
    attach(connection)
    connection.execute("insert into item values (1), (25); insert into p11 values (2)")
    assert touched(connection) == [1, 2, 25]
    detach(connection)
    assert one(connection, "select count(*) from pg_trigger where tgname ~ '^(pgchange|item_q)'") == 0
    assert one(connection, "select count(*) from pg_proc where proname like 'pgchange\\_touch%'") == 0


def test_a_partition_that_came_later_is_named_and_then_captured(connect):
    connection = connect()
    connection.execute("create table item (id int, day int, primary key (id, day)) partition by range (day)")
    make(connection)
    attach(connection, group_by=["id"])
    connection.execute("create table p1 partition of item for values from (1) to (10)")
    assert one(connection, "select untriggered::text from tube.attachments()") == "{p1}"
    assert "repaired" in one(connection, "select tube.recapture()")
    connection.execute("insert into p1 values (2, 2)")
    assert one(connection, "select untriggered::text from tube.attachments()") == "{}"
    assert connection.execute("select tube.recapture()").fetchall() == []
    assert touched(connection) == [2]


def test_an_inheritance_child_is_captured(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key)")
    connection.execute("create table child (more text) inherits (item)")
    make(connection)
    attach(connection)
    connection.execute("insert into child values (3)")
    connection.execute("update item set id = 4")
    assert set(touched(connection)) == {3, 4}


@pytest.mark.parametrize("key", ["bigint", "integer", "smallint"])
def test_ids_may_be_any_whole_number_in_any_column(connect, key):
    connection = connect()
    connection.execute(f"create table item (number {key} unique not null, id text)")
    make(connection)
    attach(connection, key=["number"])
    connection.execute("insert into item values (5, 'x'), (-3, 'y')")
    assert touched(connection) == [-3, 5]


@PREDICATES
def test_a_renamed_id_column_is_named_and_does_not_fail_the_write(item, predicate):
    judged(item, predicate)
    item.execute("insert into item values (1)")
    item.execute("alter table item rename id to number")
    item.execute("insert into item values (5)")
    item.execute("update item set number = 6 where number = 5")
    item.execute("delete from item where number = 6")
    assert touched(item) == [1, 5, 5, 6, 6]
    assert faults(item) == []
    assert one(item, "select stale from tube.attachments()") is True
    item.execute("select tube.recapture()")
    assert one(item, "select stale from tube.attachments()") is False
    item.execute("insert into item values (7)")
    assert touched(item)[-1] == 7


@PREDICATES
def test_a_dropped_id_column_does_not_fail_the_write_and_is_counted(item, predicate):
    judged(item, predicate)
    item.execute("alter table item drop column id")
    item.execute("insert into item values ('a'), ('b')")
    assert touched(item) == []
    assert faults(item)[0][0] == 2
    assert "ids are lost" in faults(item)[-1][1]


@PREDICATES
def test_an_id_column_of_another_type_does_not_fail_the_write(item, predicate):
    judged(item, predicate)
    item.execute("alter table item alter id type text")
    item.execute("insert into item values ('x'), ('12')")
    assert touched(item) == [12]
    assert faults(item)


def test_a_column_that_the_predicate_lost_does_not_fail_the_write(item):
    judged(item, "kind = 'a'")
    item.execute("alter table item drop column kind")
    item.execute("insert into item values (1), (2)")
    assert touched(item) == [1, 2]
    assert faults(item)[0][0] == 2


@PREDICATES
def test_columns_and_tables_may_have_any_name(connect, predicate):
    connection = connect()
    names = ["ids", "op", "shard", "seq", "tg_relid", "sqlerrm", "i", "r", "txid", "rows", "tube", "added"]
    connection.execute(
        f"create table kind (id bigint primary key, kind text, {', '.join(f'{n} int' for n in names)})"
    )
    make(connection, predicate=predicate)
    attach(connection, "kind")
    connection.execute("insert into kind (id, kind) values (1, 'a'), (2, 'a')")
    connection.execute("update kind set id = 3 where id = 1")
    connection.execute("alter table kind rename id to number")
    connection.execute("delete from kind where number = 3")
    assert touched(connection) == [1, 1, 2, 3, 3]
    assert faults(connection) == []


@pytest.mark.parametrize("predicate", [False, True])
def test_names_may_hold_anything(connect, predicate):
    connection = connect()
    for name in ["it's", "100%", 'a "b"', "$body$", "Größe", "select", "x" * 60]:
        quoted = psycopg.sql.Identifier(name)
        table = quoted.as_string(connection)
        connection.execute(psycopg.sql.SQL("create table {0} ({0} bigint primary key)").format(quoted))
        tube = "T" + name[:50]
        make(connection, tube, predicate=f"{table} > 0" if predicate else None)
        attach(connection, table, tube, key=[name])
        connection.execute(psycopg.sql.SQL("insert into {} values (1)").format(quoted))
        connection.execute(psycopg.sql.SQL("alter table {0} rename column {0} to other").format(quoted))
        connection.execute(psycopg.sql.SQL("insert into {} values (2)").format(quoted))
        pod_table = one(connection, "select pods::text from tube.tube")
        assert touched(connection, pod_table) == [1, 2], name
        connection.execute("select tube.tube_ensure_absent(%s)", [tube])
        connection.execute(psycopg.sql.SQL("insert into {} values (3)").format(quoted))


def test_a_partition_that_left_can_be_written_when_the_tube_is_gone(connect):
    connection = connect()
    connection.execute("create table item (id int, day int, primary key (id, day)) partition by range (day)")
    connection.execute("create table p1 partition of item for values from (1) to (10)")
    make(connection)
    attach(connection, group_by=["id"])
    connection.execute("alter table item detach partition p1")
    connection.execute("select tube.tube_ensure_absent('q')")
    connection.execute("insert into p1 values (2, 2)")


def test_stored_columns_are_ids_and_judged_like_any_other(connect):
    connection = connect()
    connection.execute(
        "create table item (n int, id bigint primary key generated always as (n * 2) stored, "
        "kind int generated always as (n + 1) stored)"
    )
    make(connection, predicate="kind > 5")
    attach(connection)
    connection.execute("insert into item values (1), (6)")
    connection.execute("update item set n = 7 where n = 1")
    assert touched(connection) == [12, 14]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            "n int, id bigint not null generated always as (n * 2) virtual, kind int",
            "column id of public.item is virtual",
        ),
        ("id bigint primary key, kind int generated always as (1) virtual", 'column "kind" does not exist'),
    ],
)
def test_virtual_columns_whose_values_no_trigger_sees_are_refused(connect, table, says):
    connection = connect()
    make(connection, predicate="kind > 0")
    before_18 = one(connection, "select current_setting('server_version_num')::int < 180000")
    with pytest.raises(psycopg.Error, match="syntax error" if before_18 else says):
        connection.execute(f"create table item ({table})")
        attach(connection, group_by=["id"])
