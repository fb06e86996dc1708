"""The workers of tubes: which have something to do."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.tube import TubeFeed


def ready(connection: psycopg.Connection[Any]) -> list[TubeFeed]:
    """The workers, of all tubes of this database that we may empty, that have something to do and are not at work."""
    query = """
        select feed from tube.status(1)
        where ready > 0 and not at_work and has_table_privilege((tube.named(feed ->> 'tube')).pods, 'delete')
        order by consumer
    """
    return [TubeFeed(**fields) for (fields,) in rows(connection, query)]


def workers(connection: psycopg.Connection[Any], tube: str) -> list[TubeFeed]:
    """Every worker of a tube."""
    query = "select feed from tube.status(1) where feed ->> 'tube' = %s order by consumer"
    return [TubeFeed(**fields) for (fields,) in rows(connection, query, [tube])]
