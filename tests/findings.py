"""What is told to a person, as lines."""

from __future__ import annotations

from psycopg import sql

from airflow_pgchange.admin.health import Finding
from airflow_pgchange.feeds.queries import rows


def findings(connection, schema, *arguments):
    """What ``health()`` of one schema says, a line for each finding."""
    query = sql.SQL("select * from {}.health({})").format(
        sql.Identifier(schema), sql.SQL(", ").join(map(sql.Literal, arguments))
    )
    return [str(Finding(*row)) for row in rows(connection, query)]
