"""Leftover staging tables are found, distinguished from tables in use, and dropped."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest

from airflow_pgchange.admin import schema
from airflow_pgchange.feeds import Batch
from airflow_pgchange.feeds.connections import connect as feed_connect
from airflow_pgchange.results.staging import create

BATCH = Batch(id="batch-1", feed="commits:test/0", version=1, attempt=2, count=3, slices=(), bounds={})
LEFTOVERS = "select name, batch_id, attempt, target, in_use from pgchange.leftovers('0')"
DROP = "select * from pgchange.drop_leftovers('0')"


def stage(db, attempt=2):
    with feed_connect(db) as connection:
        return create(connection, replace(BATCH, attempt=attempt), "public.target", [("n", "bigint")])


def test_staging_tables_of_a_dead_attempt_are_found_and_dropped(db, connect_to):
    connection = connect_to(db)
    name = stage(db)
    assert connection.execute(LEFTOVERS).fetchall() == [(name, "batch-1", 2, "public.target", False)]
    assert connection.execute(DROP).fetchall() == [(name,)]
    assert connection.execute(LEFTOVERS).fetchall() == []


def test_staging_tables_of_a_living_attempt_are_never_dropped(db, connect_to):
    consumer, connection = connect_to(db, autocommit=False), connect_to(db)
    consumer.execute("select pg_advisory_xact_lock(42)")
    name = stage(db)
    assert connection.execute(LEFTOVERS).fetchall() == [(name, "batch-1", 2, "public.target", True)]
    assert connection.execute(DROP).fetchall() == []
    consumer.rollback()
    assert connection.execute(DROP).fetchall() == [(name,)]


def test_a_later_attempt_does_not_keep_what_an_earlier_one_left(db, connect_to):
    name = stage(db)
    consumer, connection = connect_to(db, autocommit=False), connect_to(db)
    consumer.execute("select pg_advisory_xact_lock(42)")
    assert connection.execute(DROP).fetchall() == [(name,)]


def test_the_oldest_leftovers_come_first(db, connect_to):
    older, younger = (stage(db, attempt) for attempt in (2, 1))
    connection = connect_to(db)
    connection.execute(f"alter table pgchange_staging.{older} set (fillfactor = 50)")
    assert [row[0] for row in connection.execute(LEFTOVERS)] == [older, younger]


def test_young_leftovers_stay(db, connect_to):
    stage(db)
    connection = connect_to(db)
    assert connection.execute("select * from pgchange.drop_leftovers()").fetchall() == []


def test_a_table_that_is_being_written_is_left_for_the_next_time(db, connect_to):
    name = stage(db)
    writer, connection = connect_to(db, autocommit=False), connect_to(db)
    writer.execute(f"insert into pgchange_staging.{name} (n) values (1)")
    assert connection.execute(DROP).fetchall() == []


def test_a_table_that_somebody_keeps_locked_hinders_no_other_from_being_dropped(db, connect_to):
    locked, name = stage(db), stage(db, attempt=3)
    holder, connection = connect_to(db, autocommit=False), connect_to(db)
    holder.execute(f"lock table pgchange_staging.{locked}")
    assert connection.execute(DROP).fetchall() == [(name,)]


def test_tables_that_others_put_into_the_schema_are_not_touched(db, connect_to):
    connection = connect_to(db)
    connection.execute("create table pgchange_staging.mine (n int)")
    assert connection.execute(DROP).fetchall() == []


def test_a_comment_that_nobody_can_read_stops_nothing(db, connect_to):
    connection = connect_to(db)
    connection.execute("create table pgchange_staging.b0123456789abcdef_1_01234567 ()")
    comment = "comment on table pgchange_staging.b0123456789abcdef_1_01234567 is 'pgchange {}'"
    unreadable = ["{bad", "5", '{"made_at": "soon"}', '{"attempt": "x", "made_at": "2000-01-01"}']
    for told in (*unreadable, "[" * 20_000, "[" * 1_900):
        name = stage(db)
        connection.execute(comment.replace("{}", told))
        connection.execute("set max_stack_depth = '100kB'")
        assert connection.execute(DROP).fetchall() == [(name,)], told


def test_a_keeper_drops_what_others_staged_and_a_consumer_cannot(db, role, connect_to):
    owner, keeper, consumer = connect_to(db), role("keeper"), role("consumer")
    owner.execute("select pgchange.grant_maintainer(%s::regrole)", [keeper.name])
    owner.execute("select pgchange.grant_consumer(%s::regrole)", [consumer.name])
    name = stage(consumer.conninfo)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect_to(consumer.conninfo).execute(DROP)
    assert (name,) in connect_to(keeper.conninfo).execute(DROP).fetchall()


def test_public_can_do_nothing_in_staging(db, role, connect_to):
    someone = connect_to(role("someone").conninfo)
    for query in (
        LEFTOVERS,
        DROP,
        "create table pgchange_staging.t ()",
        "select pgchange.grant_maintainer('postgres')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            someone.execute(query)


def test_nothing_of_ours_lies_where_consumers_may_create(db, connect_to):
    query = """
        select pg_describe_object(classid, objid, objsubid) from pg_depend
        where (refclassid, refobjid) = ('pg_namespace'::regclass, 'pgchange_staging'::regnamespace)
    """
    assert connect_to(db).execute(query).fetchall() == []


def test_no_function_of_ours_looks_where_consumers_may_create(db, connect_to):
    query = "select oid::regprocedure from pg_proc where array_to_string(proconfig, ' ') like '%pgchange\\_staging%'"
    assert connect_to(db).execute(query).fetchall() == []


def test_a_consumer_may_create_in_staging_and_in_no_schema_of_ours(db, role, connect_to):
    owner, consumer = connect_to(db), role("consumer")
    owner.execute("select pgchange.grant_consumer(%s::regrole)", [consumer.name])
    query = "select nspname from pg_namespace where has_schema_privilege(oid, 'create') and nspname not like 'pg\\_temp%'"
    found = {name for (name,) in connect_to(consumer.conninfo).execute(query).fetchall()}
    assert found - {"public"} == {"pgchange_staging"}


def test_an_owner_that_is_no_superuser_drops_what_its_consumers_left(db, role, connect_to):
    admin, owner, consumer = connect_to(db), role("owner"), role("consumer")
    schema.uninstall(admin)
    admin.execute(f"grant create on database {admin.info.dbname} to {owner.name}")
    installed = connect_to(owner.conninfo)
    schema.install(installed, ["core"])
    installed.execute("select pgchange.grant_consumer(%s::regrole)", [consumer.name])
    read, unread = stage(consumer.conninfo, 1), stage(consumer.conninfo, 2)
    reader = connect_to(consumer.conninfo, autocommit=False)
    reader.execute(f"select from pgchange_staging.{read}")
    assert installed.execute(DROP).fetchall() == [(unread,)]
    reader.rollback()
    assert installed.execute(DROP).fetchall() == [(read,)]
