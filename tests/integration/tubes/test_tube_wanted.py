"""The rows of a copy: those for which the predicate is true, and none if row security hides rows."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange import tubes
from airflow_pgchange.errors import PermissionDenied
from airflow_pgchange.feeds import TubeFeed
from airflow_pgchange.tubes import TableDownstream, work_off
from tests.spark_session import batch_of
from tests.tubes import attach, make, one, touched

FEED = TubeFeed("copies")


def make_item(connection):
    connection.execute(
        "create table item (id bigint primary key, state text, n int); create schema copies;"
        "create table copies.item (like item, primary key (id))"
    )
    make(connection, "copies", predicate="item.state = 'open'")
    attach(connection, "item", "copies")


@pytest.fixture
def prepared_item():
    return make_item


def mirror(db):
    with batch_of(FEED, db) as job:
        for attached in job.attached():
            job.mirror(attached, into="{tube}.{table}")


def copy(connection):
    return connection.execute("select id, n from copies.item order by id").fetchall()


def test_a_row_that_enters_the_predicate_comes_and_one_that_leaves_it_goes(db, item, path):
    """Takes seconds: many batches, and this test may start the worker's Spark session."""
    item.execute("insert into item values (1, 'open', 1), (2, 'shut', 2)")
    mirror(db)
    assert copy(item) == [(1, 1)]
    item.execute("update item set state = case id when 1 then 'shut' else 'open' end")
    mirror(db)
    assert copy(item) == [(2, 2)]


def test_ids_outside_the_predicate_are_told_as_gone(db, item, path):
    item.execute("insert into item values (1, 'open', 1), (2, 'open', 2)")
    item.execute("update item set state = 'shut' where id = 2")
    with batch_of(FEED, db) as job:
        (attached,) = job.attached()
        assert [row["id"] for row in job.rows(attached).collect()] == [1]
        assert [row["id"] for row in job.gone(attached).collect()] == [2]
        assert sorted(row["id"] for row in job.rows("public.item", key="id").collect()) == [1, 2]


def test_a_row_for_which_the_predicate_fails_stays_in_the_copy(db, item, path):
    make(item, "copies", predicate="10 / n > 1")
    item.execute("insert into item values (1, 'a', 0), (2, 'a', 100), (3, 'a', 2)")
    mirror(db)
    assert copy(item) == [(1, 0), (3, 2)]


def test_behind_a_backfill_a_copy_gives_up_what_is_outside_the_predicate(db, item):
    item.execute("insert into item values (1, 'open', 1), (2, 'shut', 2)")
    item.execute("insert into copies.item select * from item")
    tubes.backfill(item, "copies", "public.item", "id")
    item.execute("delete from copies where ids <> '{}'")
    done = work_off(FEED, db, TableDownstream(db, db, FEED, "{tube}.{table}"))
    assert [one.touched for one in done] == [0, 1]
    assert touched(item, "copies") == [2]


def test_a_predicate_that_the_worker_may_not_evaluate_is_an_error_and_empties_nothing(db, item, role):
    make(item, "copies", predicate="state = 'open'")
    worker = worker_of(item, role)
    item.execute(f"revoke execute on function {judge(item)} from {conninfo_to_dict(worker)['user']}")
    item.execute("insert into item values (1, 'open', 1)")
    with pytest.raises(psycopg.errors.InsufficientPrivilege), psycopg.connect(worker) as connection:
        connection.execute("select tube.wanted('copies', 'item', '{1}')").fetchall()


def worker_of(connection, role):
    """Return the connection string of a worker with the rights that the README names."""
    who = role("worker")
    connection.execute(
        f"select tube.grant_consumer('{who.name}');"
        f"grant select, insert, delete on copies to {who.name};"
        f"grant usage on schema copies to {who.name}; grant select on item to {who.name};"
        f"grant select, insert, update, delete on all tables in schema copies to {who.name}"
    )
    connection.execute(f"grant execute on function {judge(connection)} to {who.name}")
    return who.conninfo


def judge(connection):
    (function,) = connection.execute(
        "select tube.judge_of(a)::regprocedure::text from tube.attachment as a where a.tube = 'copies'"
    ).fetchone()
    return function


@pytest.fixture
def hidden(item, role):
    """A worker whose copy holds a row that row security hides from it."""
    worker = worker_of(item, role)
    item.execute("insert into item values (1, 'open', 1), (2, 'open', 2)")
    mirror(worker)
    item.execute("alter table item enable row level security; create policy those on item using (n = 1)")
    return worker


def test_a_replay_under_row_security_is_refused_and_empties_nothing(hidden, item, path):
    item.execute("update item set state = state")
    with pytest.raises(Exception, match="bypassrls"):
        mirror(hidden)
    assert copy(item) == [(1, 1), (2, 2)]


def test_rows_of_any_table_under_row_security_are_refused(hidden, item, path):
    item.execute("update item set state = state")
    with batch_of(FEED, hidden) as job:
        for read in (job.rows, job.gone):
            with pytest.raises(Exception, match="bypassrls"):
                read("public.item", key="id").collect()


def test_a_copy_under_row_security_is_refused_as_a_mirror(db, item, role):
    worker = worker_of(item, role)
    item.execute("alter table copies.item enable row level security; insert into item values (1, 'open', 1)")
    with pytest.raises(PermissionDenied, match="could not delete rows that are gone"):
        mirror(worker)


def test_a_copy_gives_up_nothing_that_row_security_hides(hidden, item):
    tubes.backfill(item, "copies", "public.item", "id")
    item.execute("delete from copies where ids <> '{}'")
    with pytest.raises(PermissionDenied, match="bypassrls"):
        work_off(FEED, hidden, TableDownstream(hidden, hidden, FEED, "{tube}.{table}"))
    assert touched(item, "copies") == []
    assert one(item, "select count(*) from copies where payload ->> 'type' = 'backfill_end'") == 1


@pytest.fixture
def owned(item, role, connect_to):
    """An attached table with a predicate.

    The predicate runs with the rights of the owner, from whom row security hides some rows.
    """
    who = role("owner")
    item.execute(f"select tube.grant_consumer('{who.name}'); grant insert on copies to {who.name}")
    item.execute(f"create schema own authorization {who.name}")
    connection = connect_to(who.conninfo)
    connection.execute("create table own.item (id bigint primary key, state text, n int)")
    attach(connection, "own.item", "copies", 1)
    item.execute("insert into own.item values (1, 'open', 1), (2, 'open', 2); delete from copies")
    connection.execute("create policy those on own.item using (n = 1)")
    connection.execute("alter table own.item enable row level security, force row level security")
    return who


@pytest.mark.parametrize("predicate", ["item.state = 'open'", "1 / (item.n - 1) > 0"])
def test_rows_hidden_from_the_owner_do_not_count_as_deleted_for_a_worker_that_sees_them(
    owned, item, predicate
):
    """The predicate is evaluated as the owner, from whom some rows are hidden."""
    with item.transaction():
        item.execute("update tube.tube set predicate = %s", [predicate])
        item.execute(f"set local role {owned.name}")
        attach(item, "own.item", "copies", 1)
    told = f"row security hides rows of own.item from {owned.name}"
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=told):
        item.execute("select tube.wanted('copies', 'own.item', '{1,2}')").fetchall()
    with pytest.raises(PermissionDenied, match=told):
        tubes.backfill(item, "copies", "own.item", "id")
    assert touched(item, "copies") == []


@pytest.mark.parametrize("begun_before", [False, True])
def test_a_backfill_under_row_security_is_refused(hidden, item, begun_before):
    if begun_before:
        item.execute("alter table item disable row level security")
    with psycopg.connect(hidden, autocommit=True) as connection:
        if begun_before:
            connection.execute("select tube.backfill_begin('copies', 'item', 'id')")
            item.execute("alter table item enable row level security")
        with pytest.raises(PermissionDenied, match="bypassrls"):
            tubes.backfill(connection, "copies", "public.item", "id")
    assert touched(item, "copies") == []
