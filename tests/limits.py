"""Shorten limits in our SQL, for tests that would otherwise wait for seconds without a benefit."""

from __future__ import annotations

from typing import Any

import psycopg


def shorten(connection: psycopg.Connection[Any], function: str, limit: str, to: str) -> None:
    """Replace a limit in a function of this database. The function must have the limit."""
    row = connection.execute("select pg_get_functiondef(%s::regproc)", [function]).fetchone()
    assert row is not None
    assert row[0].count(limit) == 1, f"{function} has not the limit {limit}"
    connection.execute(row[0].replace(limit, to))


def shorten_locks(connection: psycopg.Connection[Any]) -> None:
    """Let maintenance wait for locks on tables for at most half a second instead of five seconds."""
    shorten(connection, "pgchange.take_locks", "interval '5 s'", "interval '0.5 s'")


def shorten_rests(connection: psycopg.Connection[Any]) -> None:
    """Shorten the pauses between the attempts to create a partition of the event log. Their number stays the same."""
    shorten(connection, "pgmb.make_partitions", "pg_sleep(0.5)", "pg_sleep(0.02)")


def be_patient(connection: psycopg.Connection[Any]) -> None:
    """Let maintenance wait for locks without a limit."""
    shorten(connection, "pgchange.patience", "least(most, pgchange.unseen())", "least(interval '60 s')")
