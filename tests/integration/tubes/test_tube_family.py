"""Partitions, children and parents: which capture belongs to which table."""

from __future__ import annotations

import psycopg
import pytest

from tests.findings import findings
from tests.tubes import attach, detach, make, one, pods, touched


def make_tree(connection):
    """Create a partitioned table with two partitions, and attach it under shard 0."""
    connection.execute("create table whole (id bigint primary key, n int) partition by range (id)")
    connection.execute("create table low partition of whole for values from (0) to (10)")
    connection.execute("create table high partition of whole for values from (10) to (20)")
    make(connection)
    attach(connection, "whole")


@pytest.fixture
def prepared_tree():
    return make_tree


@pytest.fixture
def tree(prepared_tree, connect):
    return connect()


def reasons(connection):
    return [line for (line,) in connection.execute("select tube.recapture()").fetchall()]


def test_a_detached_partition_that_is_attached_itself_touches_under_its_own_shard_only(tree):
    tree.execute("alter table whole detach partition low")
    attach(tree, "low", shard=7)
    tree.execute("insert into low values (1)")
    tree.execute("insert into whole values (11)")
    tree.execute("insert into high values (12)")
    assert pods(tree) == [("I", 7, [1]), ("I", 0, [11]), ("I", 0, [12])]


def test_detaching_a_former_partition_leaves_the_capture_of_the_whole(tree):
    tree.execute("alter table whole detach partition low")
    attach(tree, "low", shard=7)
    detach(tree, "low")
    tree.execute("insert into whole values (11)")
    tree.execute("insert into low values (1)")
    assert pods(tree) == [("I", 0, [11])]


def test_another_tube_keeps_what_it_captures_of_a_former_partition(tree):
    make(tree, "r")
    tree.execute("alter table whole detach partition low")
    attach(tree, "low", "r", shard=7)
    tree.execute("insert into low values (1)")
    assert pods(tree, "q") == [("I", 0, [1])]
    assert pods(tree, "r") == [("I", 7, [1])]


def test_a_child_and_its_parent_are_not_both_attached_to_one_tube(connect):
    connection = connect()
    connection.execute("create table parent (id bigint primary key)")
    connection.execute("create table child () inherits (parent)")
    connection.execute("alter table child alter id set not null")
    make(connection)
    attach(connection, "parent", shard=1)
    with pytest.raises(psycopg.Error, match="shares rows with public.parent") as told:
        attach(connection, "child", shard=2)
    assert "tube_table_ensure_detached('q'" in told.value.diag.message_hint
    connection.execute("insert into child values (3); update parent set id = 4")
    assert pods(connection) == [("I", 1, [3]), ("U", 1, [3, 4])]


ANIMALS = "create table animal (id bigint primary key, v int); create table dog (primary key (id)) inherits (animal)"


@pytest.mark.parametrize(
    ("tables", "table", "parent"),
    [
        (ANIMALS, "dog", "animal"),
        (ANIMALS + "; create table puppy () inherits (dog)", "dog", "animal"),
        (
            "create table a (id bigint primary key); create table b (id bigint not null);"
            "create table child () inherits (a, b)",
            "a",
            "b",
        ),
    ],
)
def test_a_table_that_is_changed_through_another_is_refused(connect, tables, table, parent):
    connection = connect()
    connection.execute(tables)
    make(connection)
    with pytest.raises(psycopg.Error, match=f"the parent public.{parent}, .* would not be captured") as told:
        attach(connection, table)
    assert f"attach public.{parent}" in told.value.diag.message_hint
    assert connection.execute("select from tube.attachment").fetchall() == []


PARENTS = {
    "a parent": ("create table root (id bigint not null, g int)", "alter table item inherit root"),
    "a partitioned table": (
        "create table root (id bigint not null, g int) partition by list (g)",
        "alter table root attach partition item for values in (1)",
    ),
    "a parent of a child": (
        "create table child () inherits (item); create table root (id bigint not null, g int)",
        "alter table child inherit root",
    ),
}


@pytest.mark.parametrize("kind", PARENTS)
def test_an_attached_table_that_gets_a_parent_is_reported(connect, kind):
    connection = connect()
    connection.execute("create table item (id bigint primary key, g int)")
    root, becomes_child = PARENTS[kind]
    connection.execute(root)
    make(connection)
    attach(connection)
    assert one(connection, "select lost from tube.attachments()") is None
    connection.execute(becomes_child)
    [line] = findings(connection, "tube")
    assert line.startswith("public.item: writes through public.root, a parent of it")
    assert "attach public.root to tube q" in line
    assert reasons(connection) == []
    # The advice of the error works.
    detach(connection)
    connection.execute("alter table root alter id set not null")
    if kind != "a parent of a child":
        attach(connection, "root", group_by=["id"])
        connection.execute("insert into root values (5, 1); update root set g = 1")
        assert pods(connection) == [("I", 0, [5]), ("U", 0, [5])]
        assert findings(connection, "tube") == []


def test_a_child_whose_ids_may_be_null_is_captured_but_for_those_rows(connect):
    connection = connect()
    connection.execute("create table parent (id bigint); create table child () inherits (parent)")
    only = one(connection, "select current_setting('server_version_num')::int < 180000")
    connection.execute(
        "alter table only parent alter id set not null"
        if only
        else "alter table parent add constraint filled not null id no inherit"
    )
    make(connection)
    attach(connection, "parent", group_by=["id"])
    connection.execute("insert into parent values (1); insert into child values (2), (null)")
    connection.execute("update parent set id = 3")
    assert touched(connection) == [1, 1, 2, 2, 3]


def test_an_attached_table_that_becomes_a_partition_keeps_its_capture_and_is_named(tree):
    tree.execute("create table more (id bigint primary key, n int)")
    attach(tree, "more", shard=1)
    tree.execute("alter table whole attach partition more for values from (20) to (30)")
    tree.execute("insert into more values (21)")
    tree.execute("insert into whole values (22)")
    assert pods(tree) == [("I", 1, [21]), ("I", 0, [22])]
    assert (
        one(tree, "select untriggered::text from tube.attachments() where tbl = 'whole'::regclass")
        == "{more}"
    )
    assert "shares rows with public.more" in reasons(tree)[0]
    detach(tree, "more")
    assert "was repaired" in reasons(tree)[0]
    tree.execute("insert into more values (23)")
    assert pods(tree)[-1] == ("I", 0, [23])
