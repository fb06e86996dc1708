"""The tables that a transaction wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from airflow_pgchange.results.written_tables import written

Connect = Callable[..., psycopg.Connection[Any]]

TABLES = """
create table plain (id integer primary key);
create table child (id integer references plain on delete cascade);
create table part (id integer) partition by range (id);
create table part_1 partition of part for values from (0) to (10);
create temporary table passing (id integer);
create schema apart;
create table apart.plain ();
insert into plain values (1), (2);
insert into child values (2);
"""


@pytest.fixture
def database(db: str, connect: Connect) -> psycopg.Connection[Any]:
    connection = connect()
    connection.execute(TABLES)
    return connection


@pytest.mark.parametrize(
    ("statement", "tables"),
    [
        ("insert into plain values (3)", {"plain"}),
        ("update plain set id = 4 where id = 1", {"plain"}),
        ("delete from plain where id = 2", {"plain", "child"}),
        ("merge into plain as t using plain as s on t.id = s.id when matched then do nothing", {"plain"}),
        ("insert into part values (1)", {"part"}),
        ("insert into part_1 values (1)", {"part_1"}),
        ("insert into child values (1)", {"child"}),
        ("insert into passing values (1)", set()),
        ("select from plain for update", set()),
        ("create table made (); comment on table made is 'x'", set()),
    ],
)
def test_a_table_is_told_that_a_statement_wrote(
    database: psycopg.Connection[Any], statement: str, tables: set[str]
) -> None:
    """Takes seconds for the first test, which waits for its server."""
    with database.transaction():
        database.execute(statement)
        assert set(written(database)) == {("public", table) for table in tables}


def test_a_table_whose_write_was_rolled_back_is_not_reported(database: psycopg.Connection[Any]) -> None:
    with database.transaction():
        with database.transaction(force_rollback=True):
            database.execute("insert into plain values (3)")
        assert written(database) == []


def test_nothing_is_told_of_the_transaction_before(database: psycopg.Connection[Any]) -> None:
    database.execute("insert into plain values (3)")
    with database.transaction():
        assert written(database) == []


def test_nothing_is_told_of_what_others_write(database: psycopg.Connection[Any], connect: Connect) -> None:
    with connect() as other, other.transaction(), database.transaction():
        other.execute("insert into plain values (3)")
        assert written(database) == []


def test_a_schema_can_be_left_out(database: psycopg.Connection[Any]) -> None:
    with database.transaction():
        database.execute("insert into plain values (3); insert into apart.plain default values")
        assert written(database, {"public"}) == [("apart", "plain")]
