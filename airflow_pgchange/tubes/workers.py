"""The workers of tubes: which have something to do, and which a name means."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.queries import ask, call, rows
from airflow_pgchange.feeds.tube import TubeFeed


def ready(connection: psycopg.Connection[Any]) -> list[TubeFeed]:
    """The workers, of all tubes of this database that we may empty, that have something to do and are not at work."""
    query = """
        select feed from tube.status(1)
        where ready > 0 and not at_work and has_table_privilege((tube.named(feed ->> 'tube')).pods, 'delete')
        order by consumer
    """
    return [TubeFeed(**fields) for (fields,) in rows(connection, query)]


def worker(connection: psycopg.Connection[Any], tube: str, number: int) -> TubeFeed:
    """A worker of a tube, of as many as share it now. Raises UnknownConsumer, and InvalidArgument for a wrong number."""
    return TubeFeed(
        tube, number, ask(connection, sql.SQL("select ({}).partitions").format(call("tube.named", tube)))
    )
