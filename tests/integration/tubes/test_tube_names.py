"""Long names, names that are in use, and pods that are renamed."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from tests.tubes import attach, controls, detach, drain, faults, make, one, pods, touched

LONG = "t" * 57
OURS = "select count(*) from pg_proc where pronamespace = 'public'::regnamespace and proname "
PREDICATES = pytest.mark.parametrize("predicate", [None, "kind is null"])


@pytest.fixture
def connection(q):
    return q


def table(connection, name):
    """Create a table with this name, and return the name as SQL."""
    quoted = sql.Identifier(name)
    connection.execute(sql.SQL("create table {} (id bigint primary key)").format(quoted))
    return quoted.as_string(connection)


def touch_functions(connection):
    return [
        row[0]
        for row in connection.execute("select proname from pg_proc where proname like 't%_touch' order by 1")
    ]


def test_tables_whose_names_begin_alike_have_touch_functions_of_their_own(connection):
    for year, shard in (("2023", 1), ("2024", 2)):
        attach(connection, table(connection, f"{LONG}_{year}"), shard=shard)
    first, second = touch_functions(connection)
    connection.execute(f"select {first}('{{1}}'), {second}('{{1}}')")
    assert sorted(pods(connection)) == [("T", 1, [1]), ("T", 2, [1])]
    detach(connection, f"{LONG}_2024")
    assert len(touch_functions(connection)) == 1


def test_a_touch_function_of_another_attached_table_is_not_taken_over_nor_dropped(connection):
    attach(connection, table(connection, f"{LONG}_2023"), shard=1)
    function = touch_functions(connection)[0]
    other = table(connection, function.removesuffix("_touch"))
    with pytest.raises(psycopg.Error, match="there is a function .* for table public.ttt"):
        attach(connection, other, shard=2)
    connection.execute(f"select {function}('{{1}}')")
    assert pods(connection) == [("T", 1, [1])]


@pytest.mark.parametrize("name", ["\U0001f600" * 15, "表" * 21, "é" * 31, "x" * 63])
def test_tables_with_names_as_long_as_can_be_are_attached_captured_and_detached(connection, name):
    quoted = table(connection, name)
    attach(connection, quoted)
    connection.execute(f"insert into {quoted} values (1)")
    connection.execute(f"update {quoted} set id = 2")
    connection.execute(f"delete from {quoted}")
    connection.execute(f"truncate {quoted}")
    assert (touched(connection), len(controls(connection))) == ([1, 1, 2, 2], 1)
    assert one(connection, OURS + "like '%%_touch'") == 2
    detach(connection, quoted)
    assert one(connection, OURS + "like any (array['%%_touch', 'pgchange%%'])") == 1
    assert one(connection, "select count(*) from pg_trigger where tgname like '%%_trigger'") == 0


@pytest.mark.parametrize("name", ["\U0001f600" * 14, "表" * 19, "é" * 28, "x" * 57])
def test_tubes_with_names_as_long_as_can_be_work_with_any_number_of_workers(connection, name):
    make(connection, name)
    make(connection, name, workers=999)
    attach(connection, table(connection, "item"), name)
    connection.execute("insert into item values (1)")
    assert touched(connection, sql.Identifier(name).as_string(connection)) == [1]


def test_two_tubes_whose_names_begin_alike_are_both_made(connection):
    for end in "12":
        make(connection, "n" * 50 + end)
        make(connection, "n" * 50 + end, workers=2)


@pytest.mark.parametrize(
    ("taken", "call", "says"),
    [
        (
            "create table n_1_workers_idx ()",
            "select tube.tube_ensure_exists('n')",
            "relation n_1_workers_idx",
        ),
        ("create table q_2_control_idx ()", "select tube.tube_ensure_exists('q', 2)", "or q_2_control_idx"),
        ("create type n as enum ('a')", "select tube.tube_ensure_exists('n')", "type public.n"),
        (
            "create function n_touch(integer, bigint[], character, jsonb, integer) returns void language sql as 'select'",
            "select tube.tube_ensure_exists('n')",
            "function public.n_touch",
        ),
        (
            "create function noop() returns trigger language plpgsql as 'begin return null; end'; "
            "create trigger item_q_after_insert_trigger after insert on item execute function noop()",
            "select tube.tube_table_ensure_attached('q', 'item', 0)",
            "trigger item_q_after_insert_trigger",
        ),
    ],
)
def test_a_name_that_is_taken_is_told_and_nothing_is_half_done(connection, taken, call, says):
    table(connection, "item")
    connection.execute(taken)
    with pytest.raises(psycopg.Error, match=says) as told:
        connection.execute(call)
    assert told.value.sqlstate == "PC008"
    assert one(connection, "select string_agg(name, ',') from tube.tube") == "q"
    assert one(connection, "select count(*) from pg_trigger where tgname like 'item_q%%'") <= 1


@pytest.mark.parametrize("searched", ["pg_temp", ""])
def test_a_tube_is_not_made_where_writers_would_not_find_it(connection, searched):
    connection.execute("select set_config('search_path', %s, false)", [searched])
    with pytest.raises(psycopg.Error, match="a tube cannot be made in") as told:
        make(connection, "r")
    assert told.value.sqlstate == "PC008"
    assert "set search_path" in told.value.diag.message_hint


@PREDICATES
def test_a_tube_in_schema_tube_is_written_whatever_a_writer_searches(connect, role, predicate):
    connection = connect()
    connection.execute("set search_path = tube")
    make(connection, "r", predicate=predicate)
    connection.execute("create table public.item (id bigint primary key, kind text)")
    attach(connection, "public.item", "r")
    connection.execute("select r_touch(0, '{7}', 'T')")
    connection.execute("select tube_pods_insert('r', 'select 8, 1', 0)")
    writer = role("writer")
    connection.execute(f"grant insert, update, delete, select, truncate on public.item to {writer.name}")
    connection.execute(f"grant create on schema public to {writer.name}")
    with psycopg.connect(writer.conninfo, autocommit=True) as session:
        session.execute("create table public.r (like public.item)")
        session.execute("set search_path = public")
        session.execute("insert into item values (1), (2); update item set id = 3 where id = 2")
        session.execute("delete from item where id = 1; truncate item")
    connection.execute("set search_path = public")
    assert touched(connection, "tube.r") == [1, 1, 2, 2, 3, 7, 8]
    assert len(controls(connection, "tube.r")) == 1
    assert drain(connection, tube="r") == [7, 1, 2, 3, 8]
    connection.execute("select tube.tube_ensure_absent('r')")
    assert one(connection, "select to_regclass('tube.r')") is None
    assert one(connection, "select count(*) from pg_proc where proname = 'r_touch'") == 0


@pytest.mark.parametrize("name", ["worker", "tube", "named", "keyset", "lag"])
def test_a_tube_does_not_take_a_name_that_schema_tube_has_for_something_else(connection, name):
    connection.execute("set search_path = tube")
    with pytest.raises(psycopg.Error, match=f"there is a .*tube.{name}") as told:
        make(connection, name)
    assert told.value.sqlstate == "PC008"


@PREDICATES
@pytest.mark.parametrize(
    "renaming",
    [
        "alter schema s1 rename to s2",
        "alter table s1.q rename to r",
        "alter table s1.q set schema public",
        "alter table s1.q set schema tube",
    ],
)
def test_pods_that_get_another_name_go_on_being_touched(connect, role, renaming, predicate):
    connection = connect()
    connection.execute("create schema s1")
    connection.execute("set search_path = s1, public")
    make(connection, predicate=predicate)
    connection.execute("create table public.item (id bigint primary key, kind text)")
    attach(connection, "public.item")
    writer = role("writer")
    connection.execute(f"grant insert, update, delete, select, truncate on public.item to {writer.name}")
    connection.execute(renaming)
    with psycopg.connect(writer.conninfo, autocommit=True) as session:
        session.execute("insert into public.item values (1), (2)")
        session.execute("update public.item set id = 3 where id = 2")
        session.execute("delete from public.item where id = 1")
        session.execute("truncate public.item")
    name = one(connection, "select pods::text from tube.tube")
    assert touched(connection, name) == [1, 1, 2, 2, 3]
    assert len(controls(connection, name)) == 1
    assert faults(connection) == []
    assert one(connection, "select stale from tube.attachments()") is True
    connection.execute("select tube.recapture()")
    assert one(connection, "select stale from tube.attachments()") is False
    with psycopg.connect(writer.conninfo, autocommit=True) as session:
        session.execute("insert into public.item values (4)")
    assert 4 in touched(connection, name)
