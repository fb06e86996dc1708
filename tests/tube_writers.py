"""Tables that touch a tube, and writes to them, for the tests."""

from __future__ import annotations

import psycopg
import pytest

from tests.tubes import attach, make

PREDICATES = pytest.mark.parametrize("predicate", [None, "kind <> 'never'"])


def make_item(connection):
    """Create a table that is attached to a tube, and return the connection."""
    connection.execute("create table item (id bigint primary key, kind text not null default 'a')")
    make(connection)
    attach(connection)
    return connection


def make_owner(connection, role):
    """Create a role that owns a table attached to a tube of the superuser."""
    who = role("owner")
    connection.execute(f"create schema own authorization {who.name}")
    make(connection)
    connection.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    connection.execute(f"grant insert (op, shard, ids, payload, ts) on q to {who.name}")
    with psycopg.connect(who.conninfo, autocommit=True) as session:
        session.execute("create table own.item (id bigint primary key, kind text not null default 'a')")
        attach(session, "own.item")
    return who


def writes(conninfo, table="public.item"):
    """Insert, update, delete and truncate rows of the table."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"insert into {table} values (1), (2)")
        connection.execute(f"update {table} set id = 3 where id = 2")
        connection.execute(f"delete from {table} where id = 1")
        connection.execute(f"truncate {table}")
