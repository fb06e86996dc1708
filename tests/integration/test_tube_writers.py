"""Nothing of a tube fails a user's write."""

from __future__ import annotations

import threading

import psycopg
import pytest

from airflow_pgchange.maintenance import maintain
from tests.limits import shorten_locks
from tests.tubes import attach, controls, detach, faults, make, one, pods, touched
from tests.waiting import until, waits

PREDICATES = pytest.mark.parametrize("predicate", [None, "kind <> 'never'"])


@pytest.fixture
def item(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, kind text not null default 'a')")
    make(connection)
    attach(connection)
    return connection


@pytest.fixture
def owner(connect, role):
    """A role that owns a table attached to the superuser's tube."""
    connection = connect()
    who = role("owner")
    connection.execute(f"create schema own authorization {who.name}")
    make(connection)
    connection.execute("select tube.grant_use(%s::regrole)", [who.name])
    connection.execute(f"grant insert (op, shard, ids, payload, ts) on q to {who.name}")
    with psycopg.connect(who.conninfo, autocommit=True) as session:
        session.execute("create table own.item (id bigint primary key, kind text not null default 'a')")
        attach(session, "own.item")
    return who


def writes(conninfo, table="public.item"):
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"insert into {table} values (1), (2)")
        connection.execute(f"update {table} set id = 3 where id = 2")
        connection.execute(f"delete from {table} where id = 1")
        connection.execute(f"truncate {table}")


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
@pytest.mark.parametrize(
    "accident",
    [
        "revoke insert on q from {owner}",
        "revoke usage on schema tube from {owner}",
        "revoke usage on sequence tube.seq from {owner}",
        "revoke all on tube.fault from {owner}",
        "revoke execute on all functions in schema tube from {owner}",
        "alter table q rename to r",
        "drop table q",
        "drop schema tube cascade",
    ],
)
def test_whatever_becomes_of_the_tube_the_write_goes_through(connect, owner, accident, predicate):
    connection = connect()
    if predicate is not None:
        with psycopg.connect(owner.conninfo, autocommit=True) as session:
            detach(session, "own.item")
        make(connection, predicate=predicate)
        with psycopg.connect(owner.conninfo, autocommit=True) as session:
            attach(session, "own.item")
    connection.execute(accident.format(owner=owner.name))
    writes(owner.conninfo, "own.item")
    # The long way round, too.
    connection.execute("alter table own.item rename id to number")
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.execute("insert into own.item values (5)")
        session.execute("update own.item set number = 6")
        session.execute("delete from own.item")
    connection.execute("alter table own.item alter number type text")
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.execute("insert into own.item values ('x')")


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
    # As well in the session that has the plan of before.
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


def test_a_fault_that_cannot_be_noted_does_not_lose_the_touch(connect, owner):
    connection = connect()
    connection.execute(f"revoke all on tube.fault from {owner.name}")
    connection.execute("alter table own.item alter id type text")
    with psycopg.connect(owner.conninfo, autocommit=True, options="-c application_name=backfill") as session:
        session.execute("insert into own.item values ('x'), ('12')")
    assert pods(connection) == [("B", 0, [12])]


def test_an_owner_that_may_only_insert_pods_has_its_truncations_captured(connect, owner):
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.execute("truncate own.item")
    assert controls(connect()) == [("T", 0, {"type": "truncate", "tbl": "own.item"})]


def test_a_write_that_cannot_be_captured_warns(connect, owner):
    connect().execute(f"revoke insert on q from {owner.name}")
    notices = []
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.add_notice_handler(lambda notice: notices.append(notice.message_primary))
        session.execute("insert into own.item values (1)")
    assert "not captured" in notices[0]


@pytest.mark.parametrize("deed", ["reassign owned by {owner} to {heir}", "revoke all on q from {owner}"])
def test_touches_that_are_lost_are_told(connect, owner, role, deed):
    connection, heir = connect(), role("heir")
    connection.execute(f"grant all on schema own to {heir.name}")
    assert one(connection, "select lost from tube.attachments()") is None
    connection.execute(deed.format(owner=owner.name, heir=heir.name))
    connection.execute("insert into own.item values (7), (8)")
    connection.execute("truncate own.item")
    assert touched(connection) == controls(connection) == []
    who = heir.name if "heir" in deed else owner.name
    told = (
        f"own.item: its owner, {who}, may not write the pods of tube q: what is changed is lost; "
        f"let their owners run: select tube.grant_use('{who}'); grant usage on schema public to {who}; "
        f"grant insert (op, shard, ids, payload, ts) on public.q to {who}; then backfill it"
    )
    assert told in maintain(connection).attention
    if who == owner.name:
        # Who may use tubes at all notes it too.
        assert [(ids, message.split(":")[0]) for ids, message in faults(connection)] == [
            (2, "rows are lost"),
            (0, "a truncation is lost"),
        ]
    connection.execute(told.split("run: ")[1].removesuffix("; then backfill it"))
    assert one(connection, "select lost from tube.attachments()") is None
    connection.execute("insert into own.item values (9)")
    assert touched(connection) == [9]


def test_truncations_that_are_lost_are_told(connect, owner):
    connection = connect()
    connection.execute(f"revoke insert (payload) on q from {owner.name}")
    assert "truncations are lost" in one(connection, "select lost from tube.attachments()")


def test_a_fault_is_noted_only_for_an_attached_table_of_ones_own(connect, owner, role):
    connection, other = connect(), role("other")
    connection.execute(f"revoke all on q from {owner.name}")
    connection.execute(f"grant create on schema public to {other.name}, {owner.name}")
    connection.execute(f"select tube.grant_use('{other.name}')")
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
    # Then the capture takes its long way round.
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
    assert touched(item) == [5, 5, 5]
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


def test_who_has_read_the_pods_can_write_while_the_number_of_workers_changes(item, connect):
    writer = connect(autocommit=False)
    writer.execute("select from q")
    changing = threading.Thread(target=make, args=[connect()], kwargs={"workers": 2})
    changing.start()
    until(item, waits(relation="q"))
    writer.execute("insert into item values (1)")
    writer.commit()
    changing.join()
    assert one(item, "select partitions from tube.tube") == 2


@PREDICATES
def test_users_prepared_transactions_go_on_working(item, predicate):
    make(item, predicate=predicate)
    item.execute("begin")
    item.execute("insert into item values (1)")
    item.execute("update item set id = 2")
    item.execute("prepare transaction 'tube-test'")
    assert pods(item) == []
    item.execute("commit prepared 'tube-test'")
    assert touched(item) == [1, 1, 2]


@PREDICATES
def test_a_write_takes_no_second_transaction_id(connect, predicate):
    connection = connect()
    connection.execute("create table item (id bigint primary key, kind text not null default 'a')")
    make(connection, predicate=predicate)
    attach(connection)
    with connection.transaction():
        own = one(connection, "select pg_current_xact_id()::text::bigint")
        for n in range(100):
            connection.execute("insert into item values (%s)", [n])
            connection.execute("update item set kind = 'b' where id = %s", [n])
    following = one(connection, "select pg_current_xact_id()::text::bigint")
    assert following - own < 100


def test_writers_go_on_while_a_table_is_attached_and_detached(item, connect):
    failures, stop = [], threading.Event()
    begun, inserted = [0, 0], [list[int](), list[int]()]

    def write(part):
        connection = connect()
        n = part
        while not stop.is_set():
            begun[part] = n
            try:
                connection.execute("insert into item values (%s)", [n])
            except psycopg.Error as error:
                failures.append(error)
                return
            inserted[part].append(n)
            n += 2

    threads = [threading.Thread(target=write, args=[part]) for part in (0, 1)]
    for thread in threads:
        thread.start()
    for turn in range(10):
        detach(item)
        attach(item, shard=turn)
    # Of those two it is not known whether they came before the capture.
    latest = list(begun)
    while min(n - last for n, last in zip(begun, latest, strict=True)) < 50:
        pass
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    since = {n for part, last in zip(inserted, latest, strict=True) for n in part if n > last}
    assert len(since) >= 40
    assert since <= set(touched(item))


def test_attaching_does_not_wait_for_a_writer_for_ever(item, connect):
    detach(item)
    writer = connect(autocommit=False)
    writer.execute("insert into item values (1)")
    shorten_locks(item, "tube")
    item.execute("set statement_timeout = '15s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="being written"):
        attach(item)
    assert item.execute("select tbl from tube.tube_list() where tbl is not null").fetchall() == []


def test_detaching_does_not_wait_for_a_writer_for_ever_and_leaves_the_capture_whole(item, connect):
    writer = connect(autocommit=False)
    writer.execute("insert into item values (1)")
    shorten_locks(item, "tube")
    item.execute("set statement_timeout = '15s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="being used"):
        detach(item)
    writer.execute("update item set kind = 'b'")
    writer.commit()
    assert touched(item) == [1, 1]


def test_uninstalling_leaves_users_tables_writable(item):
    from airflow_pgchange import schema

    schema.uninstall(item, ["tube"])
    item.execute("insert into item values (1)")
    item.execute("truncate item")
    assert one(item, "select count(*) from pg_trigger where tgrelid = 'item'::regclass") == 0
