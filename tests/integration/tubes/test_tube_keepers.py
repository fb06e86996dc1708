"""The maker of a tube cannot run code with the rights of roles that inspect, work on or touch it."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange import tubes
from airflow_pgchange.admin import consumers
from airflow_pgchange.errors import PermissionDenied
from airflow_pgchange.feeds import AllTubes, TubeFeed
from airflow_pgchange.feeds.consumer_state import lag
from tests.findings import findings
from tests.spark_session import batch_of
from tests.strangers import attacher, ran
from tests.tubes import attach, make, one, touch

DENIED = psycopg.errors.InsufficientPrivilege
IMMUTABLE = (
    "create function own.fixed(i bigint) returns bigint language plpgsql immutable as "
    "$$ begin perform own.note(); return i; end $$;"
    "create function own.fire() returns trigger language plpgsql as "
    "$$ begin perform own.note(); return coalesce(new, old); end $$"
)

CODE = {
    "an index of an expression": "create index on own.kq ((own.fixed(1)))",
    "an index of some rows": "create index on own.kq (seq) where own.fixed(1) > 0",
    "statistics": "create statistics own.planned on (own.fixed(1) + seq), shard from own.kq",
    "a policy": "alter table own.kq enable row level security; create policy p on own.kq using (own.note())",
    "a rule": "create rule r as on insert to own.kq do also select own.note()",
    "a trigger": "create trigger t before insert or delete on own.kq for each row execute function own.fire()",
    "a constraint": "alter table own.kq add check (own.fixed(1) > 0)",
    "a default": "alter table own.kq alter payload set default to_jsonb(own.note())",
    "another default": "alter table own.kq alter op set default query_to_xml('select own.note()', true, true, '')::text",
    "a column": "alter table own.kq add more boolean default own.note()",
    "a generated column": "alter table own.kq add more bigint generated always as (own.fixed(seq)) stored",
    "a type": "create type own.number as enum ('0'); create function own.read(own.number) returns integer "
    "language sql as $$ select 1 from own.note() $$; "
    "create cast (own.number as integer) with function own.read(own.number) as implicit; "
    "drop index own.kq_1_workers_idx, own.kq_1_control_idx; "
    "alter table own.kq alter shard type own.number using shard::text::own.number",
    "a domain": "create domain own.number as integer check (own.fixed(1) > 0);"
    "alter table own.kq alter shard type own.number",
    "a child": "create table own.kid () inherits (own.kq); create index on own.kid ((own.fixed(1)))",
    "a table that goes with it": "alter table own.kq add unique (seq);"
    "create table own.kid (seq bigint references own.kq (seq) on delete cascade);"
    "create trigger t after delete on own.kid for each row execute function own.fire()",
    "a view in their place": "alter table own.kq rename to was;"
    "create view own.kq as select own.was.* from own.was, own.note();"
    "update tube.tube set pods = 'own.kq' where name = 'kq'",
}


@pytest.fixture
def admin(q):
    return q


@pytest.fixture
def owner(admin, role, connect_to):
    return attacher(admin, role("owner"), connect_to)


@pytest.fixture
def keeper(owner, admin):
    """A role that has made a tube of its own, kq."""
    me = one(owner, "select current_user")
    admin.execute(f"select tube.grant_owner('{me}'::regrole)")
    owner.execute("set search_path = own")
    make(owner, "kq")
    owner.execute("reset search_path")
    owner.execute(IMMUTABLE)
    return owner


def looks(connection):
    """Call each function that reads all tubes, and return the names of the tubes in its answer."""
    lag(connection, connection, AllTubes(), 1000)
    tubes.ready(connection)
    connection.execute("select * from tube.tube_stats(), tube.attachments(), tube.tube_list(), tube.health()")
    return {row["feed"]["tube"] for row in consumers.status(connection)}


USES = [
    "select tube.touch('kq', 0, '{1}', 'T')",
    "select tube.tube_pods_insert('kq', 'select 1', 0)",
    "select tube.lag('kq', 1, 0, null)",
    "select * from tube.control_pods('kq', 1, 0)",
    "select tube.claim('kq', 0, null, 10, 1)",
    "select tube.tube_pods_delete('kq', 1, 0, '{1}')",
    "select tube.tube_pods_sql('kq', 1, 0)",
    "select tube.tube_ensure_exists('kq', 2)",
]


@pytest.mark.parametrize("code", CODE)
def test_a_superuser_runs_no_code_of_who_keeps_the_pods(keeper, admin, code):
    touch(keeper, 1, tube="kq")
    keeper.execute(CODE[code])
    assert looks(admin) == {"q"}
    for use in USES:
        with pytest.raises(DENIED, match="the pods of tube kq, own.kq, have") as told:
            admin.execute(use)
        assert "the owner of own.kq, remove it" in told.value.diag.message_hint
    assert any(line.startswith("tube kq: its pods, own.kq, have") for line in findings(admin, "tube"))
    admin.execute("select tube.tube_ensure_absent('q')")
    assert not ran(admin)


def test_a_role_that_was_granted_the_pods_runs_no_policy_of_theirs(keeper, admin, role, connect_to):
    who = role("maintainer")
    admin.execute(f"select tube.grant_consumer('{who.name}'::regrole)")
    keeper.execute(
        f"grant usage on schema own to {who.name}; grant usage on sequence own.others to {who.name}"
    )
    keeper.execute(f"grant select on own.kq to {who.name}")
    touch(keeper, 1, tube="kq")
    connection = connect_to(who.conninfo)
    assert looks(connection) == {"kq"}
    keeper.execute(CODE["a policy"])
    assert looks(connection) == set()
    with pytest.raises(DENIED, match="row security"):
        connection.execute("select tube.lag('kq', 1, 0, null)")
    assert not ran(admin)


def test_tubes_that_were_not_looked_at_are_named(keeper, admin):
    keeper.execute(CODE["a trigger"])
    told = []
    admin.add_notice_handler(lambda notice: told.append((notice.message_primary, notice.message_hint)))
    admin.execute("select * from tube.status()")
    me = one(keeper, "select current_user")
    assert told == [
        (
            "the pods of tube kq, own.kq, have a trigger, so they were left out",
            f"let {me}, the owner of own.kq, remove it, or use the tube as that role",
        )
    ]


def test_what_runs_no_code_and_what_is_ones_own_is_nothing_to_refuse(keeper, admin):
    keeper.execute("create index on own.kq (ts); create index on own.kq (abs(shard)); analyze own.kq")
    keeper.execute(
        "create statistics own.planned on op, shard from own.kq; alter table own.kq replica identity full"
    )
    assert looks(admin) == {"q", "kq"}
    touch(admin, 1, tube="kq")
    keeper.execute(CODE["a trigger"])
    touch(keeper, 2, tube="kq")
    assert looks(keeper) == {"kq"}
    admin.execute(
        "create trigger t before delete on q for each row execute function tsvector_update_trigger()"
    )
    assert looks(admin) == {"q"}


def test_a_trigger_that_somebody_put_on_pods_of_ones_own_runs_with_nobody_elses_rights(keeper, admin):
    admin.execute(f"grant trigger on q to {one(keeper, 'select current_user')}")
    keeper.execute("create trigger t before insert or delete on q for each row execute function own.fire()")
    with pytest.raises(DENIED, match="the pods of tube q, public.q, have a trigger") as told:
        touch(admin, 1)
    assert told.value.diag.message_hint == "let postgres, the owner of public.q, remove it"
    assert looks(admin) == {"kq"}
    assert any("public.q, have a trigger" in line for line in findings(admin, "tube"))
    assert not ran(admin)
    admin.execute("drop trigger t on q")
    touch(admin, 1)
    assert looks(admin) == {"q", "kq"}


def test_a_table_that_touches_such_a_tube_keeps_no_other_from_being_mended(keeper, admin):
    attach(keeper, "own.mine", "kq")
    admin.execute("create table item (id bigint primary key)")
    attach(admin)
    keeper.execute(CODE["a trigger"])
    assert set(admin.execute("select tube, stale from tube.attachments()")) == {("q", False), ("kq", False)}
    admin.execute("alter table item rename id to number")
    assert one(admin, "select array_agg(name) from tube.to_recapture()") == ["public.item"]
    admin.execute("select tube.recapture()")
    assert one(admin, "select key from tube.attachments() where tube = 'q'") == ["number"]


def test_a_tube_whose_pods_hold_code_can_be_removed_by_others(keeper, admin):
    keeper.execute(CODE["a trigger"])
    keeper.execute(CODE["an index of an expression"])
    admin.execute("select tube.tube_ensure_absent('kq')")
    assert looks(admin) == {"q"}
    assert not ran(admin)


@pytest.fixture
def ledger(keeper, admin):
    """A table that the keeper may not write, and a tube of the keeper with the name of the table's schema."""
    admin.execute("create schema finance; create table finance.ledger (id bigint primary key, amount int)")
    admin.execute("insert into finance.ledger values (1, 100), (2, 200)")
    keeper.execute("set search_path = own")
    make(keeper, "finance")
    keeper.execute("reset search_path; create table own.ledger (id bigint primary key, amount int)")
    attach(keeper, "own.ledger", "finance")
    keeper.execute(
        "insert into own.ledger values (1, 7); truncate own.ledger; insert into own.ledger values (1, 9)"
    )
    return admin


def replay(db, into="{tube}.{table}"):
    feed = TubeFeed("finance")
    with batch_of(feed, db) as job:
        for each in job.attached():
            job.mirror(each, into=into)
    tubes.work_off(feed, db, tubes.TableDownstream(db, db, feed, into))
    with psycopg.connect(db) as connection:
        is_left = one(connection, "select count(*) from own.finance")
    if is_left:
        replay(db, into)


def amounts(connection):
    return connection.execute("select id, amount from finance.ledger order by id").fetchall()


def test_settings_of_a_session_are_no_code(keeper, admin, role, connect_to):
    who = role("worker")
    admin.execute(f"select tube.grant_consumer('{who.name}'::regrole)")
    keeper.execute(f"grant usage on schema own to {who.name}; grant select on own.kq to {who.name}")
    connection = connect_to(who.conninfo)
    connection.execute("set quote_all_identifiers = on")
    connection.execute("select tube.tube_pods_sql('kq', 1, 0)")


def test_a_tube_writes_no_table_that_its_keeper_may_not_write(ledger, keeper, db):
    """Takes seconds if this test starts the worker's Spark session."""
    feed = TubeFeed("finance")
    keeper_name = one(keeper, "select current_user")
    told = f"finance.ledger is not written, because {keeper_name}, the owner of tube finance, may not"
    with pytest.raises(PermissionDenied, match=told):
        replay(db)
    keeper.execute("delete from own.finance where ids <> '{}'")
    with pytest.raises(PermissionDenied, match="grant select, insert, update, delete"):
        tubes.work_off(feed, db, tubes.TableDownstream(db, db, feed, "{tube}.{table}"))
    assert amounts(ledger) == [(1, 100), (2, 200)]
    assert one(ledger, "select count(*) from own.finance") == 1


def test_a_tube_writes_a_copy_that_its_keeper_was_granted(ledger, keeper, db):
    ledger.execute(
        f"grant select, insert, update, delete on finance.ledger to {one(keeper, 'select current_user')}"
    )
    replay(db)
    assert amounts(ledger) == [(1, 9)]


@pytest.mark.parametrize("into", ["finance.ledger", "finance.{table}"])
def test_a_copy_whose_schema_the_author_of_the_dag_names_is_written(ledger, db, into):
    replay(db, into)
    assert amounts(ledger) == [(1, 9)]


@pytest.mark.parametrize("what", ["table", "schema"])
def test_a_tube_writes_no_copy_whose_owner_could_have_code_run(ledger, keeper, db, what):
    """Takes seconds if this test starts the worker's Spark session."""
    keeper_name = one(keeper, "select current_user")
    ledger.execute(f"grant select, insert, update, delete on finance.ledger to {keeper_name}")
    ledger.execute(
        f"alter {what} {'finance.ledger' if what == 'table' else 'finance'} owner to {keeper_name}"
    )
    with pytest.raises(
        PermissionDenied, match=f"belongs to {keeper_name}, whose triggers would run with the rights of"
    ):
        replay(db)
    assert amounts(ledger) == [(1, 100), (2, 200)]
