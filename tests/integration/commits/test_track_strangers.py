"""Code of a tracked table's owner never runs with the rights of another role, such as the role of the maintenance."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest

from tests.strangers import ran, stranger


@pytest.fixture
def admin(connect):
    return connect()


@pytest.fixture
def owner(admin, role, connect_to):
    """A session of a role that may track its table own.mine."""
    who = role("owner")
    admin.execute("select revision.grant_owner(%s::regrole)", [who.name])
    return stranger(admin, who, connect_to, rows=1)


def failed(owner):
    owner.execute(
        "insert into revision.fault (tbl, commit_id, message) values ('own.mine'::regclass, 1, 'mine')"
    )


CALLS = ["select revision.replay_faults('own.mine')", "call revision.enqueue_existing('own.mine')"]


@pytest.mark.parametrize("call", CALLS)
def test_an_expression_does_not_run_for_who_does_not_own_the_table(admin, owner, call):
    owner.execute(
        "create function own.place() returns bigint language sql as $$ select 0 from own.note() $$;"
        "select revision.track('own.mine', branch_id => 'own.place()')"
    )
    failed(owner)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"its owner, {owner.info.user},"):
        admin.execute(call)
    assert not ran(admin)
    owner.execute(call)
    assert admin.execute("select commit_id, branch_id from revision.commit_queue").fetchall() == [(1, 0)]


@pytest.mark.parametrize("call", CALLS)
def test_casts_of_what_the_key_has_become_run_for_nobody_else(admin, owner, call):
    owner.execute("select revision.track('own.mine')")
    failed(owner)
    owner.execute(
        "create type own.key as enum ('1');"
        "create function own.read(own.key) returns bigint language sql as $$ select 1 from own.note() $$;"
        "create cast (own.key as bigint) with function own.read(own.key) as implicit;"
        "alter table own.mine alter id type own.key using '1'"
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"its owner, {owner.info.user},"):
        admin.execute(call)
    assert not ran(admin)


@pytest.mark.parametrize("call", CALLS)
def test_a_view_in_the_place_of_a_table_is_read_by_nobody_else(admin, owner, call):
    owner.execute("select revision.track('own.mine')")
    failed(owner)
    owner.execute(
        "drop trigger pgchange_capture on own.mine; truncate own.mine; alter table own.mine drop constraint mine_pkey"
    )
    owner.execute("vacuum own.mine")
    # Since version 16 PostgreSQL itself refuses to replace a table by a view.
    with suppress(psycopg.errors.WrongObjectType):
        owner.execute(
            'create rule "_RETURN" as on select to own.mine do instead select 1::bigint as id from own.note()'
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"its owner, {owner.info.user},"):
            admin.execute(call)
    assert not ran(admin)


@pytest.mark.parametrize("call", CALLS)
def test_policies_of_a_table_run_for_nobody_else(admin, owner, role, connect_to, call):
    owner.execute("select revision.track('own.mine')")
    failed(owner)
    owner.execute(
        "alter table own.mine enable row level security; create policy p on own.mine using (own.note())"
    )
    keeper = role("keeper")
    admin.execute("select revision.grant_owner(%s::regrole)", [keeper.name])
    owner.execute(f"grant usage on schema own to {keeper.name}; grant select on own.mine to {keeper.name}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"owner.*, {owner.info.user},"):
        connect_to(keeper.conninfo).execute(call)
    assert not ran(admin)


PLANNED = {
    "the predicate of an index": "create index on own.mine (id) where own.settled(1)",
    "the expression of an index": "create index on own.mine ((own.settled(1)))",
    "an operator in an index": (
        "create function own.least(int, int) returns boolean language plpgsql immutable as "
        "$$ begin return own.settled($1); end $$;"
        "create operator own.<< (leftarg = int, rightarg = int, function = own.least);"
        "create index on own.mine (id) where 1 operator(own.<<) 2"
    ),
    "an index of a child": (
        "create table own.child () inherits (own.mine); create index on own.child (id) where own.settled(1)"
    ),
    "a check of a child": (
        "create table own.child (check (id > 0 or own.settled(1))) inherits (own.mine); insert into own.child values (5)"
    ),
}
"""By name of an object: a definition with an expression that PostgreSQL evaluates while it plans a query."""


@pytest.mark.parametrize("kind", PLANNED)
def test_an_expression_that_is_evaluated_while_planning_runs_for_no_other_role(admin, owner, kind):
    owner.execute("select revision.track('own.mine')")
    owner.execute(
        "create function own.settled(int) returns boolean language plpgsql immutable as "
        "$$ begin perform own.note(); return true; end $$"
    )
    owner.execute(PLANNED[kind])
    failed(owner)
    calls = [*CALLS, "select revision.track('own.mine')"]
    for call in calls:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"its owner, {owner.info.user},"):
            admin.execute(call)
        assert not ran(admin), call
    for call in calls:
        owner.execute(call)


def test_the_code_that_a_table_has_in_it_is_named_with_what_it_is_in(admin, owner):
    owner.execute(
        "create function own.settled(int) returns boolean language sql immutable return true;"
        "create index mine_settled on own.mine (id) where own.settled(1)"
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
        admin.execute("select revision.track('own.mine')")
    told = f"own.settled(integer) of {owner.info.user} in own.mine_settled"
    assert refused.value.diag.message_primary.endswith(told)


@pytest.mark.parametrize("call", CALLS)
def test_an_index_with_postgresqls_own_functions_is_no_code_of_anybody(admin, owner, call):
    owner.execute("create index on own.mine (abs(id)) where id > 0; select revision.track('own.mine')")
    admin.execute(call)


def test_an_owner_cannot_make_a_role_that_maintains_all_tables_run_code(admin, owner):
    smuggled = (
        "own.pgchange_capture_mine(); create table own.smuggled (); drop function if exists own.nothing"
    )
    owner.execute("select revision.track('own.mine')")
    parameters = owner.execute(
        "select proargnames from pg_proc where oid = 'revision.register'::regproc"
    ).fetchone()[0]
    says = {"tbl": "own.mine", "key": "{id}", "branch_id": 0, "expression": None, "function": smuggled}
    given = [says.get(name, 0) for name in parameters]
    owner.execute(f"select revision.register({', '.join(['%s'] * len(given))})", given)
    owner.execute("drop trigger pgchange_capture on own.mine")
    admin.execute("select revision.recapture()")
    assert admin.execute("select to_regclass('own.smuggled')").fetchone() == (None,)
    admin.execute("insert into own.mine values (2)")
    assert admin.execute("select commit_id from revision.commit_queue").fetchall() == [(2,)]


def test_a_table_that_is_captured_by_a_function_of_another_role_is_not_registered(admin, owner):
    """Otherwise the owner of the table could make a role that maintains all tables call that function."""
    admin.execute(
        "create function public.theirs() returns trigger language plpgsql as 'begin return null; end'"
    )
    admin.execute("grant execute on function public.theirs() to public")
    owner.execute(
        "create trigger pgchange_capture after insert on own.mine for each row execute function public.theirs()"
    )
    with pytest.raises(psycopg.errors.DatabaseError, match="own.mine is not captured by its owner"):
        owner.execute("insert into revision.tracked (tbl, key, branch_id) values ('own.mine', '{id}', 0)")
