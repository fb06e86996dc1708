"""Find the workers of tubes."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.tube import TubeFeed


def ready(connection: psycopg.Connection[Any]) -> list[TubeFeed]:
    """Return the idle workers with ready changes, of all tubes of this database that this role may work on."""
    query = """
        select feed from tube.status(1)
        where ready > 0 and not at_work and has_table_privilege((tube.named(feed ->> 'tube')).pods, 'delete')
        order by consumer
    """
    return [TubeFeed(**fields) for (fields,) in rows(connection, query)]


def workers(connection: psycopg.Connection[Any], tube: str) -> list[TubeFeed]:
    """Return every worker of a tube."""
    query = "select feed from tube.status(1) where feed ->> 'tube' = %s order by consumer"
    return [TubeFeed(**fields) for (fields,) in rows(connection, query, [tube])]
