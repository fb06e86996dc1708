"""Read the findings of the systems' health as lines."""

from __future__ import annotations

from psycopg import sql

from airflow_pgchange.admin.health import Finding
from airflow_pgchange.feeds.queries import rows


def findings(connection, schema, *arguments):
    """Return the findings of a schema's ``health()``, a line for each."""
    query = sql.SQL("select * from {}.health({})").format(
        sql.Identifier(schema), sql.SQL(", ").join(map(sql.Literal, arguments))
    )
    return [str(Finding(*row)) for row in rows(connection, query)]
