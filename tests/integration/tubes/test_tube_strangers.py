"""Code of a table's owner never runs with another role's rights when the table is backfilled or compared."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest

from airflow_pgchange.errors import Refused
from tests.strangers import attacher, ran
from tests.tubes import attach, begin, make, one, run, touched


@pytest.fixture
def admin(q):
    return q


@pytest.fixture
def owner(admin, role, connect_to):
    return attacher(admin, role("owner"), connect_to)


def use(admin, order_col="id"):
    """Run a backfill, and compare the table with a copy."""
    for way in (
        lambda: run(admin, begin(admin, "own.mine", order_col, chunk_size=100)),
        lambda: admin.execute("select tube.wanted('q', 'own.mine', '{1}')"),
    ):
        with suppress(Refused, psycopg.Error, AssertionError):
            way()


SIGNATURE = "{judge}(bigint[], name, boolean, text, text, integer)"
LIKENESS = (
    "{judge}(asked bigint[], order_col name, in_nulls boolean, last_value text, last_id text, chunk integer, "
    "out looked_at SIZE, out upto_value text, out upto_id text, out ids bigint[], out failed bigint, "
    "out message text) language plpgsql"
)
IMPOSTORS = {
    "an overload": f"create function {LIKENESS.replace('asked bigint[]', 'asked text')}"
    " as $$ begin perform own.note(); end $$",
    "another in its place": f"alter function {SIGNATURE} security invoker;"
    f"create or replace function {LIKENESS} as $$ begin perform own.note(); end $$;"
    "create function {judge}(text) returns text security definer language sql as $$ select own.note() $$",
    "one whose result is cast": f"drop function {SIGNATURE}; create type own.size as (n bigint);"
    "create function own.read(own.size) returns bigint language sql as $$ select 7 from own.note() $$;"
    "create cast (own.size as bigint) with function own.read(own.size) as assignment;"
    f"create function {LIKENESS.replace('SIZE', 'own.size')} security definer "
    "as $$ begin looked_at := row(7); end $$",
}


@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_a_function_that_only_looks_like_the_predicates_runs_for_nobody(owner, admin, impostor):
    make(admin, predicate="id > 0")
    attach(owner, "own.mine", shard=5)
    judge = one(owner, "select 'own.' || proname from pg_proc where proname like 'pgchange\\_judge%%'")
    owner.execute(IMPOSTORS[impostor].replace("SIZE", "bigint").format(judge=judge))
    use(admin)
    assert not ran(admin)


TYPES = {
    "a domain": "create domain own.day as integer check (own.note());"
    "alter table own.mine add day own.day default 1",
    "an array of a domain": "create domain own.day as integer check (own.note());"
    "alter table own.mine add day own.day[] default '{1}'",
    "a range of a domain": "create domain own.day as integer check (own.note());"
    "create type own.days as range (subtype = own.day); alter table own.mine add day own.days default '[1,2]'",
    "a type with casts": "create type own.day as enum ('a', 'b');"
    "create function own.read(own.day) returns text language sql as $$ select 'a' from own.note() $$;"
    "create cast (own.day as text) with function own.read(own.day) as assignment;"
    "alter table own.mine add day own.day default 'a'",
}


@pytest.mark.parametrize("kind", TYPES)
def test_functions_of_a_users_type_do_not_run_for_a_backfill(owner, admin, kind):
    owner.execute(TYPES[kind])
    attach(owner, "own.mine", shard=5)
    use(admin, "day")
    assert not ran(admin)


def test_a_type_that_takes_the_place_of_another_meanwhile_is_refused(owner, admin):
    owner.execute("create domain own.day as integer; alter table own.mine add day own.day default 1")
    attach(owner, "own.mine", shard=5)
    number = begin(admin, "own.mine", "day", chunk_size=100)
    owner.execute(
        "alter domain own.day rename to former; create domain own.number as integer check (own.note());"
        "create type own.day as range (subtype = own.number);"
        "alter table own.mine drop day; alter table own.mine add day own.day default '[1,2]'"
    )
    with pytest.raises(psycopg.Error, match="a type with an order, casts or checks of its own"):
        run(admin, number)
    assert not ran(admin)


def test_a_backfill_goes_by_a_column_of_a_domain(owner, admin):
    owner.execute(
        "create domain own.day as char(5) check (value <> 'x'); alter table own.mine add day own.day"
    )
    owner.execute("update own.mine set day = (id % 3)::text || 'abc'")
    attach(owner, "own.mine", shard=5)
    run(admin, begin(admin, "own.mine", "day", chunk_size=100))
    assert touched(admin) == list(range(1, 501))


def test_a_table_that_has_become_a_view_is_refused(owner, admin):
    attach(owner, "own.mine", shard=5)
    number = begin(admin, "own.mine", "id", chunk_size=100)
    triggers = owner.execute(
        "select tgname from pg_trigger where tgrelid = 'own.mine'::regclass and not tgisinternal"
    )
    for (name,) in triggers.fetchall():
        owner.execute(f"drop trigger {name} on own.mine")
    owner.execute("truncate own.mine; alter table own.mine drop constraint mine_pkey")
    owner.execute("vacuum own.mine")
    # Since version 16 PostgreSQL itself refuses to replace a table by a view.
    with suppress(psycopg.errors.WrongObjectType):
        owner.execute(
            'create rule "_RETURN" as on select to own.mine do instead select 1::bigint as id from own.note()'
        )
        for way in (
            lambda: run(admin, number),
            lambda: admin.execute("select tube.wanted('q', 'own.mine', '{1}')"),
            lambda: begin(admin, "own.mine", "id"),
        ):
            with pytest.raises(psycopg.Error, match="is no longer a table"):
                way()
    assert not ran(admin)


LEFT_BEHIND = {
    "a trigger that is deferred": "create table own.trap ();"
    "create function own.fire() returns trigger language plpgsql as $$ begin perform own.note(); return null; end $$;"
    "create constraint trigger t after insert on own.trap deferrable initially deferred "
    "for each row execute function own.fire();"
    "create function own.wanted() returns boolean language plpgsql as "
    "$$ begin insert into own.trap default values; return true; end $$",
    "a cursor that is held": "create function own.wanted() returns boolean language plpgsql as $$ begin "
    "execute 'declare held cursor with hold for select own.note()'; return true; "
    "exception when duplicate_cursor then return true; end $$",
    "a path": "create function own.to_jsonb(x anyelement) returns jsonb language sql as "
    "$$ select jsonb '{}' from own.note() $$;"
    "create function own.wanted() returns boolean language plpgsql as "
    "$$ begin perform set_config('search_path', 'own, pg_catalog', false); return true; end $$",
}
ASKED = {
    "a backfill": lambda admin: run(admin, begin(admin, "own.mine", "id", chunk_size=100)),
    "a comparison": lambda admin: admin.execute("select tube.wanted('q', 'own.mine', '{1}')"),
    "who attaches anew": lambda admin: attach(admin, "own.mine", shard=5),
}


@pytest.mark.parametrize("left", LEFT_BEHIND)
@pytest.mark.parametrize("asked", ASKED)
def test_nothing_that_a_predicate_leaves_behind_runs_for_who_asked(owner, admin, left, asked):
    make(admin, predicate="own.settled(0) and own.wanted()")
    owner.execute(LEFT_BEHIND[left])
    # The function runs while a query is planned, because its arguments are constant and it is declared immutable.
    owner.execute(
        "create function own.at_once() returns boolean language plpgsql as $$ begin return own.wanted(); end $$;"
        "create function own.settled(i bigint) returns boolean immutable language plpgsql as "
        "$$ begin return own.at_once(); end $$"
    )
    attach(owner, "own.mine", shard=5)
    ASKED[asked](admin)
    admin.execute("select to_jsonb(1)")
    assert not ran(admin)
    assert "own" not in one(admin, "show search_path")


PLANNED = (
    "create function own.settled(i bigint) returns bigint immutable language plpgsql as "
    "$$ begin perform own.note(); return i; end $$;"
    "create index on own.mine ((own.settled(1)))"
)


def test_functions_of_indexes_do_not_run_for_a_backfill_with_a_predicate(owner, admin):
    owner.execute(PLANNED)
    make(admin, predicate="id > 0")
    attach(owner, "own.mine", shard=5)
    use(admin)
    admin.execute("delete from q")
    admin.execute("select tube.tube_backfill_step3(tube.tube_backfill_step1(), 'q', 'own.mine', 'id')")
    assert touched(admin) == list(range(1, 501))
    assert not ran(admin)


def test_functions_of_indexes_do_not_run_when_a_backfill_only_begins(owner, admin):
    owner.execute(PLANNED)
    attach(owner, "own.mine", shard=5)
    begin(admin, "own.mine", "id")
    assert not ran(admin)


@pytest.mark.parametrize(
    "asked",
    [
        "select tube.tube_backfill_step3(tube.tube_backfill_step1(), 'q', 'own.mine', 'id')",
        "select * from tube.wanted('q', 'own.mine', '{1}')",
    ],
    ids=["backfill", "wanted"],
)
def test_functions_of_indexes_do_not_run_when_another_role_reads_the_table(owner, admin, asked):
    owner.execute(PLANNED)
    attach(owner, "own.mine", shard=5)
    with pytest.raises(
        psycopg.errors.InsufficientPrivilege, match=f"its owner, {owner.info.user}, and no others"
    ):
        admin.execute(asked)
    assert not ran(admin)
    owner.execute("select * from tube.wanted('q', 'own.mine', '{1}')")
