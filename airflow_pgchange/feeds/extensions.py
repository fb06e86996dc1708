"""The extensions that some of our schemas need."""

from __future__ import annotations

from psycopg import sql

EXTENSIONS: dict[str, str] = {}
"""The extension that a schema needs, by the schema's name, as ``our_schema`` has registered it."""


def is_missing(extension: str) -> sql.Composed:
    """Return a query for whether a server lacks an extension."""
    query = "select not exists (select from pg_catalog.pg_available_extensions where name = {})"
    return sql.SQL(query).format(extension)


def advice(extension: str) -> str:
    """Return the advice for a server that lacks an extension."""
    return f"the server has no {extension}: install postgresql-contrib there, then run `airflow-pgchange install`"
