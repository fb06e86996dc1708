"""Repairing the capture of many tables: a table that cannot be repaired does not hinder the others."""

from __future__ import annotations

import threading

import psycopg
import pytest

from airflow_pgchange.admin.maintenance import maintain
from tests.limits import shorten_locks
from tests.tubes import attach, make, one, touched
from tests.waiting import waits

BROKEN = {
    "no ids any more": (
        "create table item (id bigint primary key, n int)",
        "alter table item drop column id",
    ),
    "a foreign child": (
        "create table item (id bigint primary key)",
        "create foreign data wrapper nothing; create server elsewhere foreign data wrapper nothing; "
        "create foreign table leaf () inherits (item) server elsewhere; select tube.recapture()",
    ),
    "a predicate's column is gone": (
        "create table item (id bigint primary key, n int)",
        "alter table item drop column n; alter table item rename id to number",
    ),
}


@pytest.fixture(params=BROKEN)
def broken(connect, request):
    """A table that cannot be repaired, and a table with a new partition."""
    connection = connect()
    made, breaks = BROKEN[request.param]
    connection.execute(made)
    make(connection, predicate="n is null" if "predicate" in request.param else None)
    attach(connection)
    make(connection, "r")
    connection.execute("create table whole (id bigint primary key) partition by range (id)")
    attach(connection, "whole", "r")
    connection.execute(breaks)
    connection.execute("create table low partition of whole for values from (0) to (10)")
    return connection


def test_a_table_that_cannot_be_mended_is_told_and_the_others_are_mended(broken):
    lines = sorted(line for (line,) in broken.execute("select tube.recapture()").fetchall())
    assert "public.item: its capture for tube q cannot be repaired: " in lines[0]
    assert lines[1:] == ["public.whole: its capture for tube r was repaired"]
    broken.execute("insert into low values (1)")
    assert touched(broken, "r") == [1]


def test_maintenance_names_a_table_that_cannot_be_mended_and_mends_the_others(broken):
    report = maintain(broken)
    assert any(
        "public.item: its capture for tube q cannot be repaired: " in line for line in report.attention
    )
    assert "public.whole: its capture for tube r was repaired" in report.done
    assert report.failed == []


def test_maintenance_postpones_a_table_that_is_being_written_and_mends_the_others(connect):
    connection = connect()
    make(connection)
    for name in ("a", "b"):
        connection.execute(f"create table {name} (id bigint primary key) partition by range (id)")
        attach(connection, name)
        connection.execute(f"create table {name}_1 partition of {name} for values from (0) to (10)")
    writer = connect(autocommit=False)
    writer.execute("insert into a_1 values (1)")
    shorten_locks(connection)
    report = maintain(connection)
    assert "public.a: postponed, it is being written" in report.done
    assert "public.b: its capture for tube q was repaired" in report.done


def make_two(connection):
    make(connection)
    for name in ("a", "b"):
        connection.execute(f"create table {name} (id bigint primary key, n int) partition by range (id)")
        connection.execute(f"create table {name}_1 partition of {name} for values from (0) to (10)")
        attach(connection, name)


@pytest.fixture
def prepared_two():
    return make_two


@pytest.fixture
def two(prepared_two, connect):
    return connect()


A_2 = "create table a_2 partition of a for values from (10) to (20)"
B_2 = "create table b_2 partition of b for values from (10) to (20)"
CHANGES = {
    "": ["select tube.tube_ensure_absent('q')", "select tube.tube_table_ensure_detached('q', null)"],
    f"{A_2}; {B_2}": ["select tube.recapture()"],
    A_2: ["select tube.tube_table_ensure_attached('q', 'a')"],
}


def orders(spoil):
    """Return pairs of partitions of which a user's transaction locks the first and then the second."""
    if not spoil:
        return [("b_1", "a_1")]
    return [("b_1", "a_1"), ("b_2" if B_2 in spoil else "b_1", "a_2"), ("a_2", "a_1"), ("a_1", "a_2")]


@pytest.mark.parametrize(
    ("spoil", "call", "first", "second"),
    [(spoil, call, *pair) for spoil, calls in CHANGES.items() for call in calls for pair in orders(spoil)],
)
def test_a_users_transaction_is_not_ended_as_a_deadlock_by_a_change_of_several_tables(
    two, connect, spoil, call, first, second
):
    if spoil:
        two.execute(spoil)
    user = connect(autocommit=False)
    user.execute(f"lock table only {first} in row exclusive mode")
    changing = connect()
    told = []

    def change():
        try:
            changing.execute(call)
        except psycopg.Error as error:
            told.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    # In some cases the call need not wait for the transaction, and ends.
    while thread.is_alive() and not one(two, waits(changing)):
        thread.join(0.01)
    user.execute(f"lock table only {second} in row exclusive mode")
    user.commit()
    thread.join()
    assert told == []
