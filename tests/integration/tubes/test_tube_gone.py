"""Dropped tables of a tube, and tables that a role may not see, do not stop the others."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from airflow_pgchange import tubes
from airflow_pgchange.admin import consumers, schema
from airflow_pgchange.errors import PermissionDenied, Refused, SchemaMissing
from airflow_pgchange.feeds.error_translation import from_postgres, translated
from airflow_pgchange.feeds.queries import ask
from tests.tubes import attach, make, one, touch, touched


def make_database(connection):
    make(connection)
    for name in ("a", "b"):
        connection.execute(f"create table {name} (id bigint primary key, n int)")
        attach(connection, name)


@pytest.fixture
def prepared_database():
    return make_database


@pytest.fixture
def connection(prepared_database, connect):
    return connect()


def test_a_dropped_table_does_not_keep_the_predicate_from_changing(connection):
    connection.execute("drop table a")
    make(connection, predicate="n > 0")
    connection.execute("insert into b values (1, 0), (2, 1)")
    assert touched(connection) == [2]


def test_a_dropped_table_can_be_detached_and_leaves_no_function(connection):
    number = one(connection, "select tbl::oid from tube.attachment where tbl = 'a'::regclass")
    connection.execute("drop table a")
    connection.execute("select tube.tube_table_ensure_detached('q', %s::oid)", [number])
    assert connection.execute("select tbl::text from tube.attachment").fetchall() == [("b",)]
    assert one(connection, "select count(*) from pg_proc where proname like 'pgchange_t%%'") == 4


def test_a_keeper_whose_pods_were_dropped_makes_the_tube_anew_and_is_told(connection, role, connect_to):
    who = role("keeper")
    connection.execute("select tube.grant_owner(%s::regrole)", [who.name])
    connection.execute(f"create schema own authorization {who.name}")
    keeper = connect_to(who.conninfo)
    keeper.execute("set search_path = own")
    keeper.execute("create table own.thing (id bigint primary key)")
    make(keeper, "mine")
    attach(keeper, "own.thing", "mine")
    keeper.execute("drop table own.mine")
    with pytest.raises(psycopg.Error, match="pods of tube mine is gone") as refused:
        attach(keeper, "own.thing", "mine")
    assert "tube_ensure_exists('mine')" in refused.value.diag.message_hint
    told = []
    keeper.add_notice_handler(lambda d: told.append(d.message_primary))
    make(keeper, "mine")
    assert told == [
        "the table of the pods of tube mine was dropped: the tube is made anew, and no table is attached to it"
    ]
    attach(keeper, "own.thing", "mine")
    keeper.execute("insert into own.thing values (1)")
    assert touched(keeper, "mine") == [1]


def test_a_tube_that_a_role_may_only_touch_does_not_stop_its_looks_at_others(connection, role, connect_to):
    make(connection, "mine")
    who = role("worker")
    connection.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    connection.execute(f"grant select, delete on mine to {who.name}; grant insert on q to {who.name}")
    touch(connection, 1, tube="mine")
    worker = connect_to(who.conninfo)
    assert [row["feed"]["tube"] for row in consumers.status(worker)] == ["mine"]
    assert [feed.tube for feed in tubes.ready(worker)] == ["mine"]
    assert one(worker, "select tube.lag_of_idle(1000)")["ready"] == 1
    assert worker.execute("select tube from tube.tube_stats()").fetchall() == [("mine",)]


def test_a_tube_that_a_role_may_not_empty_is_not_ready_for_it(connection, role, connect_to):
    who = role("looker")
    connection.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    connection.execute(f"grant select on q to {who.name}")
    touch(connection, 1)
    looker = connect_to(who.conninfo)
    assert [(row["feed"]["tube"], row["ready"]) for row in consumers.status(looker)] == [("q", 1)]
    assert tubes.ready(looker) == []
    assert one(looker, "select tube.lag_of_idle(1000)")["ready"] == 0


@pytest.fixture(params=["in a schema that it may not use", "that somebody has locked"])
def shut(request, connection, connect):
    """A tube r that cannot be read: its schema is closed, or its pods are locked.

    Everybody may read and delete its pods.
    """
    connection.execute("create schema his; set search_path = his")
    make(connection, "r")
    connection.execute("reset search_path; grant select, delete on his.r to public")
    attach(connection, "a", "r")
    if "locked" in request.param:
        connection.execute("grant usage on schema his to public")
        connect(autocommit=False).execute("lock table his.r")


def test_a_tube_that_cannot_be_read_stops_no_look_at_others(connection, shut, role, connect_to):
    who = role("worker")
    connection.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    connection.execute(f"grant select, delete on q to {who.name}")
    touch(connection, 1)
    worker = connect_to(who.conninfo)
    worker.execute("set statement_timeout = '10s'")
    assert [row["feed"]["tube"] for row in consumers.status(worker)] == ["q"]
    assert [feed.tube for feed in tubes.ready(worker)] == ["q"]
    assert one(worker, "select tube.lag_of_idle(1000)")["ready"] == 1
    assert worker.execute("select tube from tube.tube_stats()").fetchall() == [("q",)]
    assert set(worker.execute("select tube from tube.attachments()").fetchall()) == {("q",), ("r",)}


def test_a_tube_takes_its_faults_with_it(connection):
    make(connection, predicate="1 / n = 1")
    attach(connection, "a")
    connection.execute("insert into a values (1, 0)")
    assert one(connection, "select count(*) from tube.fault") == 1
    connection.execute("select tube.tube_ensure_absent('q')")
    assert one(connection, "select count(*) from tube.fault") == 0


def test_a_missing_right_on_a_tube_is_told_with_the_grants_of_tubes(connection, role, connect_to):
    worker = connect_to(role("nobody").conninfo)
    with pytest.raises(PermissionDenied) as error, translated():
        ask(worker, sql.SQL("select tube.tube_list()"))
    assert "tube.grant_consumer" in str(error.value)
    assert "pubsub" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("select tube.tube_table_ensure_attached('q', 'public.nope', 0)", False),
        ("select tube.nothing()", True),
        ("select from tube.nothing", True),
    ],
)
def test_a_missing_table_of_the_users_is_not_taken_for_a_missing_installation(connection, call, missing):
    with pytest.raises(psycopg.Error) as told:
        connection.execute(call)
    assert isinstance(from_postgres(told.value), SchemaMissing) is missing


def test_ids_of_two_dimensions_are_refused(connection):
    for call in ("select q_touch(0, '{{1,2},{3,4}}', 'T')", "select a_touch('{{1,2},{3,4}}')"):
        with pytest.raises(psycopg.Error, match="2 dimensions") as told:
            connection.execute(call)
        assert isinstance(from_postgres(told.value), Refused)
    assert touched(connection) == []


def test_a_tube_that_went_with_its_schema_leaves_its_name_free(connect):
    connection = connect()
    connection.execute(
        "create schema x; create table item (id bigint primary key); set search_path = x, public"
    )
    make(connection)
    attach(connection)
    connection.execute("drop schema x cascade; reset search_path")
    make(connection)
    connection.execute("insert into item values (1)")
    assert touched(connection) == []
    attach(connection)
    connection.execute("insert into item values (2)")
    assert touched(connection) == [2]


def test_a_table_that_went_with_its_schema_can_be_made_and_attached_again(connect):
    connection = connect()
    make(connection)
    for number in (1, 2):
        connection.execute("create schema x; create table x.item (id bigint primary key)")
        attach(connection, "x.item")
        connection.execute("insert into x.item values (%s)", [number])
        connection.execute("select x.item_touch('{7}')")
        connection.execute("drop schema x cascade")
    assert touched(connection) == [1, 2, 7, 7]
    assert one(connection, "select count(*) from pg_proc where proname like 'pgchange_touch%%'") == 0


CHANGES = (
    "insert into item values (1, 'a'), (2, 'a'); update item set id = 3 where id = 2; "
    "delete from item where id = 1; truncate item"
)


@pytest.mark.parametrize("predicate", [None, "kind <> 'never'"])
def test_a_schema_that_was_dropped_by_hand_stops_no_writer_and_can_be_installed_again(
    db, connect_to, predicate
):
    connection = connect_to(db)
    told = []
    connection.add_notice_handler(lambda d: told.append((d.severity, d.message_primary)))
    connection.execute("create table item (id bigint primary key, kind text)")
    make(connection, predicate=predicate)
    attach(connection)
    connection.execute("set client_min_messages = warning; drop schema tube cascade")
    connection.execute(CHANGES)
    assert schema.uninstall(connection, ["tube"]) == []
    schema.install(connection, ["tube"])
    connection.execute(CHANGES)
    assert told == []
    connection.execute("create schema s; set search_path = s, public")
    make(connection)
    connection.execute(CHANGES)
    assert (told, one(connection, "select count(*) from tube.fault")) == ([], 0)
    attach(connection, "public.item")
    connection.execute("insert into item values (1, 'a')")
    assert (told, touched(connection)) == ([], [1])
    assert schema.uninstall(connection, ["tube"]) == ["tube"]
    connection.execute(CHANGES.replace("(1, 'a'), ", ""))
    assert told == []
