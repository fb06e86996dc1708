"""Fixtures of several modules of the tests of the event log."""

from __future__ import annotations

import pytest

TABLES = ("config", "condition", "subscription_groups", "subscriptions", "events", "pushed_table")


def contents(connection):
    """Return the rows of the log's tables, and its partitions."""
    rows = {
        table: connection.execute(f"select * from pgmb.{table} order by 1").fetchall() for table in TABLES
    }
    query = "select relname from pg_class where relnamespace = 'pgmb'::regnamespace order by 1"
    return rows | {"relations": connection.execute(query).fetchall()}


@pytest.fixture(scope="module")
def unchanged(shared):
    """A connection to an event log, for calls that are refused. After the tests of the module the log must be
    unchanged."""
    before = contents(shared)
    yield shared
    assert contents(shared) == before
