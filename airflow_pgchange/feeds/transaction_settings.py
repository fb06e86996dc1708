"""Values that belong to a transaction, kept in settings of it.

PostgreSQL forgets a value with the transaction, or with a savepoint of it that is rolled back.
"""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.queries import ask


def value_of(connection: psycopg.Connection[Any], name: str) -> str | None:
    """Return the value of a setting; None if the transaction has none."""
    value: str | None = ask(connection, sql.SQL("select {}").format(_value(name)))
    return value


def change(
    connection: psycopg.Connection[Any], name: str, expression: LiteralString, **values: object
) -> str:
    """Set the value of a setting, and return it.

    ``expression`` is SQL. ``{last}`` in it is the previous value, a text or NULL, and each other name is a key of
    ``values``.
    """
    changed = sql.SQL(expression).format(last=_value(name), **values)
    query = sql.SQL("select pg_catalog.set_config({}, ({})::text, true)").format(name, changed)
    value: str = ask(connection, query)
    return value


def _value(name: str) -> sql.Composed:
    return sql.SQL("nullif(pg_catalog.current_setting({}, true), '')").format(name)
