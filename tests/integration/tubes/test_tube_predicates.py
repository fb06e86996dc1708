"""A predicate is one expression. It runs with the rights of each attached table's owner, who must have agreed."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest

from airflow_pgchange.admin.maintenance import maintain
from tests.tubes import attach, begin, chunk, faults, make, one, run, touched

DENIED = psycopg.errors.InsufficientPrivilege
SPY = (
    "create function own.spy() returns boolean language plpgsql immutable as $$ begin "
    "insert into own.seen values (current_user); return true; end $$"
)


@pytest.fixture
def admin(connect):
    """A superuser with a table of its own."""
    connection = connect()
    connection.execute("create table item (id bigint primary key, kind text default 'a')")
    connection.execute("insert into item values (1)")
    return connection


@pytest.fixture
def keeper(admin, role, connect_to):
    """A role that creates tubes, and its tube ``mine``, to which the superuser has attached a table."""
    who = role("keeper")
    admin.execute("select tube.grant_owner(%s::regrole)", [who.name])
    admin.execute(f"create schema own authorization {who.name}")
    connection = connect_to(who.conninfo)
    connection.execute("set search_path = own")
    connection.execute("create table own.seen (who name); grant usage on schema own to public")
    connection.execute("grant insert on own.seen to public")
    connection.execute(SPY)
    make(connection, "mine")
    attach(admin, "item", "mine")
    return connection


def everything_that_a_superuser_does(admin):
    admin.execute("insert into item values (2)")
    admin.execute("select tube.recapture()")
    maintain(admin)
    run(admin, begin(admin, order_col="id", tube="mine"))
    admin.execute("insert into item values (3)")


def test_a_row_for_which_the_predicate_fails_may_have_columns_that_cannot_be_compared(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int, told json, place point)")
    make(connection, predicate="1 / n > 0")
    attach(connection)
    connection.execute("insert into item values (1, 1, '{}', '(0,0)'), (2, 1, '{}', '(0,0)')")
    connection.execute("update item set n = 0, told = '[]' where id = 2")
    connection.execute("delete from item")
    assert set(touched(connection)) == {1, 2}
    assert faults(connection) == [(1, "division by zero")] * 2


@pytest.mark.parametrize(
    "way",
    [
        "select tube.tube_ensure_exists('mine', predicate => 'own.spy()')",
        "update tube.tube set predicate = 'own.spy()' where name = 'mine'",
        "update tube.attachment set predicate = 'own.spy()'",
        "delete from tube.attachment; insert into tube.attachment "
        "(tube, tbl, shard, key, key_numbers, key_types, is_grouped, predicate, token, number_of) "
        "values ('mine', 'public.item', 0, '{id}', '{1}', '{bigint}', false, 'own.spy()', 'x', 1)",
    ],
)
def test_a_keepers_new_predicate_is_not_run_with_the_rights_of_who_did_not_agree(keeper, admin, way):
    with suppress(DENIED):
        keeper.execute(way)
    if one(admin, "select count(*) from tube.attachment"):
        everything_that_a_superuser_does(admin)
    assert keeper.execute("select who from own.seen").fetchall() == []


def test_a_predicate_that_waits_for_the_owners_agreement_is_named_and_in_force_when_he_attaches_again(
    keeper, admin
):
    notices = []
    keeper.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    make(keeper, "mine", predicate="kind = 'b'")
    assert ["keeps the predicate that its owner has agreed to" in notice for notice in notices] == [True]
    admin.execute("insert into item values (2, 'a')")
    assert touched(admin, "own.mine") == [2]
    assert one(admin, "select predicate_waits from tube.attachments()") is True
    assert any("has another predicate than its owner agreed to" in line for line in maintain(admin).attention)
    attach(admin, "item", "mine")
    admin.execute("insert into item values (3, 'a'), (4, 'b')")
    assert touched(admin, "own.mine") == [2, 4]
    assert one(admin, "select predicate_waits from tube.attachments()") is False


def test_a_keepers_new_predicate_is_in_force_for_his_own_tables_at_once(keeper, admin):
    keeper.execute("create table thing (id bigint primary key)")
    attach(keeper, "own.thing", "mine")
    make(keeper, "mine", predicate="id > 5")
    keeper.execute("insert into thing values (1), (9)")
    assert touched(keeper, "mine") == [9]


FAILING = "create or replace function own.spy() returns boolean language plpgsql as $$ begin return 1 / 0 > 0; end $$"


@pytest.fixture
def owner(admin, role, connect_to):
    """The owner of a table that is attached to a tube of the superuser.

    The predicate records the role as which it runs.
    """
    who = role("owner")
    admin.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    admin.execute(f"create schema own authorization {who.name}")
    make(admin, "mine", predicate="own.spy()")
    admin.execute(f"grant insert, select on mine to {who.name}")
    connection = connect_to(who.conninfo)
    connection.execute(
        "create sequence own.for_owner; create sequence own.for_others;"
        "create function own.spy() returns boolean language plpgsql as $$ begin "
        f"perform nextval(case current_user when '{who.name}' then 'own.for_owner' else 'own.for_others' end);"
        "return true; end $$"
    )
    connection.execute("create table own.item (id bigint primary key); insert into own.item values (1), (2)")
    attach(connection, "own.item", "mine")
    return connection


def ran_for(owner):
    """Return whether the predicate ran as the owner, and whether it ran as other roles.

    Transactions that were rolled back count, too.
    """
    return owner.execute(
        "select a.is_called, b.is_called from own.for_owner as a, own.for_others as b"
    ).fetchone()


def test_a_backfill_by_another_applies_the_predicate_with_the_rights_of_the_tables_owner(owner, admin):
    run(admin, begin(admin, "own.item", "id", tube="mine"))
    admin.execute("insert into own.item values (3)")
    assert ran_for(owner) == (True, False)
    assert touched(admin, "mine") == [1, 2, 3]


def test_a_backfill_counts_rows_for_which_the_predicate_fails_and_touches_them(owner, admin):
    owner.execute(FAILING)
    run(admin, begin(admin, "own.item", "id", tube="mine"))
    assert touched(admin, "mine") == [1, 2]
    assert faults(admin) == [(2, "division by zero")]


def test_ids_are_judged_with_the_rights_of_the_tables_owner_too(owner, admin):
    query = "select tube.judged_ids(a, '{2, 7, 1}'::bigint[]) from tube.attachment as a"
    assert sorted(one(admin, query)) == [1, 2]
    assert ran_for(owner) == (True, False)
    owner.execute(FAILING)
    assert sorted(one(admin, query)) == [1, 2]


def test_an_error_about_a_predicate_names_the_role_that_may_allow_it(owner, admin, role, connect_to):
    worker = role("worker")
    admin.execute("select tube.grant_consumer(%s::regrole)", [worker.name])
    admin.execute(
        f"grant insert, select on mine to {worker.name}; grant usage on schema own to {worker.name}"
    )
    admin.execute(f"grant select on own.item to {worker.name}")
    connection = connect_to(worker.conninfo)
    number = begin(connection, "own.item", "id", tube="mine")
    with pytest.raises(DENIED, match="only the owner of the table may apply") as told:
        chunk(connection, number)
    owner.execute(told.value.diag.message_hint.split("or run: ")[1])
    run(connection, number)
    assert touched(admin, "mine") == [1, 2]


def test_attaching_cannot_take_the_functions_of_another_owners_table(owner, admin):
    admin.execute("create table item_of_admin (id bigint primary key)")
    attach(admin, "item_of_admin", "mine")
    theirs = "select token from tube.attachment where tbl = 'item_of_admin'::regclass"
    with pytest.raises(psycopg.errors.UniqueViolation):
        owner.execute(
            "update tube.attachment set token = %s where tbl = 'own.item'::regclass", [one(admin, theirs)]
        )


def test_a_new_owner_of_a_table_does_not_run_the_predicate_before_he_attaches_it(owner, admin):
    admin.execute("alter table own.item owner to postgres")
    assert "by attaching it again" in maintain(admin).attention[0] or "another owner" in one(
        admin, "select tube.recapture()"
    )
    with pytest.raises(psycopg.Error, match="another owner"):
        run(admin, begin(admin, "own.item", "id", tube="mine"))
    admin.execute("insert into own.item values (3)")
    assert not ran_for(owner)[1]


INJECTIONS = [
    "true); drop table item; select (1",
    "true; drop table item",
    "1]; drop table item; select array[1",
    "true) union select (1",
    "true) or (true",
    "true] or [true",
    "true) limit 0 --",
    "true /*",
    "true, true",
    "--",
]


@pytest.mark.parametrize("way", ["new", "changed", "update"])
def test_a_predicate_is_never_more_than_one_expression(admin, way):
    make(admin, "there")
    call = {
        "new": "select tube.tube_ensure_exists('made', predicate => %s)",
        "changed": "select tube.tube_ensure_exists('there', predicate => %s)",
        "update": "update tube.tube set predicate = %s",
    }[way]
    for predicate in INJECTIONS:
        with pytest.raises(psycopg.Error, match="does not parse") as told:
            admin.execute(call, [predicate])
            pytest.fail(f"{predicate} was taken")
        assert told.value.sqlstate == "PC008", predicate
        assert one(admin, "select id from item") == 1
        assert admin.execute("select name, predicate from tube.tube").fetchall() == [("there", None)]


@pytest.mark.parametrize(
    ("predicate", "setting", "theirs"),
    [
        ("at >= '2024-01-01'", "timezone", "America/New_York"),
        ("at::date >= '2024-01-01'", "timezone", "America/New_York"),
        ("at >= '01/02/2024'", "datestyle", "SQL, DMY"),
        ("(at - '2023-12-31Z')::text like '% day%'", "intervalstyle", "iso_8601"),
    ],
)
def test_a_predicate_means_the_same_in_whatever_zone_and_style_a_session_is(
    admin, connect, predicate, setting, theirs
):
    admin.execute("create table flight (id bigint primary key, at timestamptz)")
    make(admin, "flights", predicate=predicate)
    attach(admin, "flight", "flights")
    elsewhere = connect()
    elsewhere.execute(f"set {setting} = '{theirs}'")
    elsewhere.execute(
        "insert into flight select g, '2023-12-31 12:00Z'::timestamptz + g * interval '1 hour' "
        "from generate_series(1, 900) as g"
    )
    as_written = touched(admin, "flights")
    assert 0 < len(as_written) < 900
    for session in (admin, elsewhere):
        wanted = session.execute("select tube.wanted('flights', 'flight', array(select id from flight))")
        assert sorted(row[0] for row in wanted) == as_written
        session.execute("truncate flights")
        run(session, begin(session, "flight", "id", tube="flights"))
        assert touched(admin, "flights") == as_written


@pytest.mark.parametrize("predicate", [r"kind <> '\'", r"kind ~ '^\d+$'"])
def test_a_predicate_means_the_same_whatever_a_sessions_strings_mean(admin, connect, predicate):
    make(admin, "mine", predicate=predicate)
    session = connect()
    session.execute("set standard_conforming_strings = off; set escape_string_warning = off")
    attach(session, "item", "mine")
    session.execute("update item set kind = '12'")
    session.execute("insert into item values (2, 'x')")
    run(session, begin(session, "item", "id", tube="mine"))
    expected = [1, 1, 2, 2] if "<>" in predicate else [1, 1]
    assert touched(admin, "mine") == expected
    assert faults(admin) == []
    assert one(session, "select untriggered::text from tube.attachments()") == "{}"


@pytest.mark.parametrize(
    "call",
    [
        "select tube.tube_table_ensure_attached('q', 'item', 0)",
        "select tube.tube_ensure_exists('q', predicate => 'id > 1')",
    ],
)
def test_a_lock_that_is_not_had_in_time_is_no_fault_of_the_predicate(connect, call):
    connection = connect()
    connection.execute("create table item (id bigint primary key)")
    make(connection, predicate="id > 0")
    attach(connection)
    connect(autocommit=False).execute("alter table item add column x integer")
    connection.execute("set lock_timeout = '300ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        connection.execute(call)


def test_a_new_predicate_that_waits_for_a_lock_in_vain_is_not_called_bad_sql(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key)")
    connect(autocommit=False).execute("lock table item")
    connection.execute("set lock_timeout = '300ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        make(connection, predicate="id in (select i.id from public.item as i)")
