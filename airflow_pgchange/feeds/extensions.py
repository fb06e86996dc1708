"""What a server must have for some of our schemas, beyond PostgreSQL itself."""

from __future__ import annotations

from psycopg import sql

EXTENSIONS: dict[str, str] = {}
"""The extension that a schema needs, by the schema's name, as it was told."""


def is_missing(extension: str) -> sql.Composed:
    """Asks a server whether it lacks an extension."""
    query = "select not exists (select from pg_catalog.pg_available_extensions where name = {})"
    return sql.SQL(query).format(extension)


def advice(extension: str) -> str:
    """What to do where it does."""
    return f"the server has no {extension}: install postgresql-contrib there, then run `airflow pgchange install`"
