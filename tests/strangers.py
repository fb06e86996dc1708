"""Owners of tables with code that others must not run, and a record of the roles that ran it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from tests.tubes import one

Connection = psycopg.Connection[Any]


def stranger(admin: Connection, who: Any, connect_to: Callable[[str], Connection], rows: int) -> Connection:
    """A session of a role with the table own.mine and the function own.note().

    The function records if another role executes it, even in a transaction that fails.
    """
    admin.execute(f"create schema own authorization {who.name}")
    connection = connect_to(who.conninfo)
    connection.execute(
        "create table own.mine (id bigint primary key);"
        f"insert into own.mine select generate_series(1, {rows});"
        "create sequence own.others; create function own.note() returns boolean language plpgsql as $$ begin"
        f"    if current_user <> '{who.name}' then perform nextval('own.others'); end if;"
        "    return true; end $$"
    )
    return connection


def attacher(admin: Connection, who: Any, connect_to: Callable[[str], Connection]) -> Connection:
    """A role like ``stranger`` that may also attach its table to tube q."""
    admin.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    admin.execute(f"grant insert (op, shard, ids, payload, ts) on q to {who.name}")
    return stranger(admin, who, connect_to, rows=500)


def ran(admin: Connection) -> bool:
    """Whether own.note() ran as anybody but the owner."""
    return bool(one(admin, "select is_called from own.others"))
