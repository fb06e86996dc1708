"""What is left over in staging: found, told from what is in use, and dropped."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest

from airflow_pgchange.feeds import Batch
from airflow_pgchange.feeds.connect import connect as feed_connect
from airflow_pgchange.feeds.staging import create

BATCH = Batch(id="batch-1", feed="test/0", version=1, attempt=2, count=3, slices=(), bounds={})
LEFTOVERS = "select name, batch_id, attempt, target, in_use from pgchange_staging.leftovers('0')"
DROP = "select * from pgchange_staging.drop_leftovers('0')"


def stage(db, attempt=2):
    with feed_connect(db) as connection:
        return create(connection, replace(BATCH, attempt=attempt), "public.target", [("n", "bigint")])


def test_what_a_dead_attempt_staged_is_found_and_dropped(own_database, connect_to):
    connection = connect_to(own_database)
    name = stage(own_database)
    assert connection.execute(LEFTOVERS).fetchall() == [(name, "batch-1", 2, "public.target", False)]
    assert connection.execute(DROP).fetchall() == [(name,)]
    assert connection.execute(LEFTOVERS).fetchall() == []


def test_what_a_living_attempt_staged_is_never_dropped(own_database, connect_to):
    consumer, connection = connect_to(own_database, autocommit=False), connect_to(own_database)
    consumer.execute("select pg_advisory_xact_lock(42)")
    name = stage(own_database)
    assert connection.execute(LEFTOVERS).fetchall() == [(name, "batch-1", 2, "public.target", True)]
    assert connection.execute(DROP).fetchall() == []
    consumer.rollback()
    assert connection.execute(DROP).fetchall() == [(name,)]


def test_a_later_attempt_does_not_keep_what_an_earlier_one_left(own_database, connect_to):
    name = stage(own_database)
    consumer, connection = connect_to(own_database, autocommit=False), connect_to(own_database)
    consumer.execute("select pg_advisory_xact_lock(42)")
    assert connection.execute(DROP).fetchall() == [(name,)]


def test_the_oldest_leftovers_come_first(own_database, connect_to):
    older, younger = (stage(own_database, attempt) for attempt in (2, 1))
    connection = connect_to(own_database)
    connection.execute(f"alter table pgchange_staging.{older} set (fillfactor = 50)")
    assert [row[0] for row in connection.execute(LEFTOVERS)] == [older, younger]


def test_young_leftovers_stay(own_database, connect_to):
    stage(own_database)
    connection = connect_to(own_database)
    assert connection.execute("select * from pgchange_staging.drop_leftovers()").fetchall() == []


def test_a_table_that_is_being_written_is_left_for_the_next_time(own_database, connect_to):
    name = stage(own_database)
    writer, connection = connect_to(own_database, autocommit=False), connect_to(own_database)
    writer.execute(f"insert into pgchange_staging.{name} (n) values (1)")
    assert connection.execute(DROP).fetchall() == []


def test_tables_that_others_put_into_the_schema_are_not_touched(own_database, connect_to):
    connection = connect_to(own_database)
    connection.execute("create table pgchange_staging.mine (n int)")
    assert connection.execute(DROP).fetchall() == []


@pytest.mark.parametrize(
    "told", ["{bad", "5", '{"made_at": "soon"}', '{"attempt": "x", "made_at": "2000-01-01"}']
)
def test_a_comment_that_nobody_can_read_stops_nothing(own_database, connect_to, told):
    connection = connect_to(own_database)
    name = stage(own_database)
    connection.execute("create table pgchange_staging.b0123456789abcdef_1_01234567 ()")
    connection.execute(f"comment on table pgchange_staging.b0123456789abcdef_1_01234567 is 'pgchange {told}'")
    assert connection.execute(DROP).fetchall() == [(name,)]


def test_a_keeper_drops_what_others_staged_and_a_consumer_cannot(db, role, connect_to):
    owner, keeper, consumer = connect_to(db), role("keeper"), role("consumer")
    owner.execute("select pgchange_staging.grant_maintainer(%s::regrole)", [keeper.name])
    owner.execute("select pgchange_staging.grant_consumer(%s::regrole)", [consumer.name])
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
        "select pgchange_staging.grant_maintainer('postgres')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            someone.execute(query)


def test_every_public_object_says_what_it_is_for(db, connect_to):
    undocumented = """
        select p.oid::regprocedure::text from pg_proc p
        where p.pronamespace = 'pgchange_staging'::regnamespace and obj_description(p.oid, 'pg_proc') is null
        union all
        select c.oid::regclass::text from pg_class c
        where c.relnamespace = 'pgchange_staging'::regnamespace and c.relkind = 'r'
          and obj_description(c.oid, 'pg_class') is null
    """
    assert connect_to(db).execute(undocumented).fetchall() == []


def test_functions_that_run_as_their_owner_never_look_where_consumers_may_create(db, connect_to):
    query = """
        select proname from pg_proc
        where pronamespace = 'pgchange_staging'::regnamespace
          and not coalesce(proconfig, '{}') @> array['search_path=pg_catalog, pg_temp']
    """
    assert connect_to(db).execute(query).fetchall() == []
