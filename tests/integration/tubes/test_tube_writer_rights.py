"""The role whose rights, names and functions count in a write to a table of a tube."""

from __future__ import annotations

import psycopg
import pytest

from tests.tube_writers import PREDICATES, make_item, make_owner, writes
from tests.tubes import attach, controls, faults, make, one, pods, touched


@pytest.fixture
def item(connect):
    return make_item(connect())


@pytest.fixture
def owner(connect, role):
    """A role that owns a table attached to the superuser's tube."""
    return make_owner(connect(), role)


@PREDICATES
def test_a_plain_writer_needs_rights_on_its_own_table_only(item, role, predicate):
    make(item, predicate=predicate)
    writer = role("writer")
    item.execute(f"grant insert, update, delete, select, truncate on item to {writer.name}")
    writes(writer.conninfo)
    assert touched(item) == [1, 1, 2, 2, 3]
    assert len(controls(item)) == 1
    with psycopg.connect(writer.conninfo, autocommit=True) as connection:
        for call in [
            "insert into q (shard, ids) values (1, '{1}')",
            "select q_touch(1, '{1}', 'T')",
            "select item_touch('{1}')",
            "insert into tube.fault (tube, tbl, ids, message) values ('q', 'item', 1, 'x')",
        ]:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(call)


@PREDICATES
def test_a_writer_whose_predicate_fails_needs_no_right_on_faults(item, role, predicate):
    make(item, predicate="1 / (id - 1) > 0" if predicate else None)
    writer = role("writer")
    item.execute(f"grant insert, update, delete, select, truncate on item to {writer.name}")
    if predicate is None:
        item.execute("alter table item alter id type text")
    with psycopg.connect(writer.conninfo, autocommit=True) as connection:
        connection.execute("insert into item values (1)")
    assert touched(item) == [1]
    assert len(faults(item)) == (0 if predicate is None else 1)


@PREDICATES
@pytest.mark.parametrize("accident", ["alter table q rename to r", "drop table q"])
def test_a_table_that_takes_the_name_of_the_pods_is_not_written_for_them(
    connect, owner, role, connect_to, accident, predicate
):
    admin, taker = connect(), role("taker")
    if predicate is not None:
        make(admin, predicate=predicate)
        attach(connect_to(owner.conninfo), "own.item")
    admin.execute(f"grant usage, create on schema public to {taker.name}")
    writer = connect_to(owner.conninfo)
    writer.execute("insert into own.item values (1)")
    admin.execute(accident)
    connect_to(taker.conninfo).execute(
        "create table q (op char(1), shard int, ids bigint[]); grant insert on q to public;"
        "create table ran_as (who name);"
        "create function note() returns trigger language plpgsql security definer as "
        "$$ begin insert into ran_as values (session_user); return new; end $$;"
        "create trigger note before insert on q for each row execute function note()"
    )
    # The session that has kept the earlier plan does not write there either.
    for session in (writer, connect_to(owner.conninfo)):
        session.execute(
            "update own.item set kind = 'b'; insert into own.item values (2); delete from own.item"
        )
    assert one(admin, "select count(*) from q") == 0
    assert one(admin, "select count(*) from ran_as") == 0
    if "rename" in accident:
        found = admin.execute("select op, array(select distinct unnest(ids) order by 1) from r order by seq")
        assert found.fetchall() == [
            ("I", [1]), ("U", [1]), ("I", [2]), ("D", [1, 2]), ("I", [2]), ("D", [2])
        ]  # fmt: skip
    else:
        assert one(admin, "select count(*) from tube.fault") > 0


def test_a_fault_is_noted_only_for_an_attached_table_of_ones_own(connect, owner, role):
    connection, other = connect(), role("other")
    connection.execute(f"revoke all on q from {owner.name}")
    connection.execute(f"grant create on schema public to {other.name}, {owner.name}")
    connection.execute(f"select tube.grant_consumer('{other.name}')")
    note = "insert into tube.fault (tube, tbl, ids, message) values ('q', {}::regclass, 1, 'x')"
    connection.execute("grant usage on schema own to public")
    with psycopg.connect(other.conninfo, autocommit=True) as session:
        session.execute("create table mine (id bigint primary key)")
        for table in ["'own.item'", "'mine'"]:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                session.execute(note.format(table))
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.execute(note.format("'own.item'"))
    assert faults(connection) == [(1, "x")]


@pytest.mark.parametrize("name", ["q", "fault", "tube", "attachment"])
def test_pods_do_not_go_astray_in_a_users_temporary_table(item, name):
    item.execute(
        f"create temporary table {name} "
        "(op text, shard int, ids bigint[], payload jsonb, tube text, tbl regclass, message text)"
    )
    item.execute("insert into item values (1)")
    item.execute("truncate item")
    assert one(item, "select count(*) from public.q") == 2


@pytest.mark.parametrize("way", ["type", "operator"])
@PREDICATES
def test_a_writer_cannot_make_the_capture_run_code_of_his_own(item, role, way, predicate):
    make(item, predicate=predicate)
    # A renamed key column makes the capture take its slow path.
    item.execute("alter table item rename id to number")
    writer = role("writer")
    item.execute(f"grant insert, update, select, truncate on item to {writer.name}")
    item.execute(f"create schema own authorization {writer.name}")
    with psycopg.connect(writer.conninfo, autocommit=True) as connection:
        connection.execute(
            "create table own.seen (who name); grant all on own.seen to public; grant usage on schema own to public"
        )
        connection.execute(
            "create function own.note(a anyelement) returns boolean language plpgsql as "
            "$$ begin insert into own.seen values (current_user); return true; end $$"
        )
        if way == "type":
            for name in ("record", "text", "jsonb", "name", "regclass"):
                connection.execute(
                    f"create domain own.{name} as pg_catalog.text check (own.note(value::pg_catalog.text))"
                )
        else:
            connection.execute(
                "create function own.get(a jsonb, b text) returns text language sql as "
                "$$ select case when own.note(b) then '1' end $$;"
                "create operator own.->> (leftarg = jsonb, rightarg = text, function = own.get);"
                "create function own.more(a int, b int) returns boolean language sql as $$ select own.note(b) $$;"
                "create operator own.> (leftarg = int, rightarg = int, function = own.more);"
                "create operator own.= (leftarg = int, rightarg = int, function = own.more)"
            )
        connection.execute("set search_path = own, pg_catalog, public")
        connection.execute("insert into public.item values (5, 'a')")
        connection.execute("update public.item set kind = 'b'")
        connection.execute("truncate public.item")
    assert touched(item) == [5, 5]
    assert item.execute("select who from own.seen").fetchall() == []


@PREDICATES
def test_a_writers_operators_and_functions_are_not_those_of_the_capture(item, role, predicate):
    make(item, predicate=predicate)
    writer = role("writer")
    item.execute(f"grant insert, update, delete, select on item to {writer.name}")
    item.execute(f"create schema own authorization {writer.name}")
    with psycopg.connect(writer.conninfo, autocommit=True) as connection:
        connection.execute(
            "create table own.seen (who name); grant all on own.seen to public; grant usage on schema own to public"
        )
        for left, right in (("bigint[]", "bigint[]"), ("int", "int")):
            connection.execute(
                f"create function own.differ(a {left}, b {right}) returns boolean language plpgsql as "
                "$$ begin insert into own.seen values (current_user); return true; end $$"
            )
            for operator in ("=", "<>", ">", "<="):
                connection.execute(
                    f"create operator own.{operator} (leftarg = {left}, rightarg = {right}, function = own.differ)"
                )
        for call in ("cardinality(bigint[])", "unnest(bigint[])", "current_setting(text)"):
            connection.execute(
                f"create function own.{call} returns int language plpgsql as "
                "$$ begin insert into own.seen values (current_user); return 1; end $$"
            )
        connection.execute("set search_path = own, pg_catalog, public")
        connection.execute("insert into public.item select generate_series(1::bigint, 1000)")
        connection.execute("update public.item set id = 1001 where id operator(pg_catalog.=) 1")
        connection.execute("delete from public.item where id operator(pg_catalog.>) 999")
        connection.execute("delete from public.item where false")
    assert [len(ids) for _, _, ids in pods(item)] == [900, 100, 2, 2]
    assert item.execute("select who from own.seen").fetchall() == []


def test_a_predicate_runs_with_the_rights_of_the_tables_owner(connect, owner):
    connection = connect()
    connection.execute("create table secret (n bigint)")
    with pytest.raises(psycopg.Error, match="permission denied"), connection.transaction():
        connection.execute(f"set local role {owner.name}")
        connection.execute("select tube.check_predicate('exists (select from public.secret)', 'own.item')")
    with pytest.raises(psycopg.Error, match="permission denied"):
        make(connection, predicate="exists (select from public.secret)")
    connection.execute(f"grant select on secret to {owner.name}")
    make(connection, predicate="exists (select from public.secret)")
    connection.execute(f"revoke select on secret from {owner.name}")
    connection.execute("insert into secret values (1)")
    connection.execute("insert into own.item values (1)")
    assert touched(connection) == [1]
    assert "permission denied" in faults(connection)[0][1]
