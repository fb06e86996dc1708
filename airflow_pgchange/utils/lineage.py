"""Collect the data for OpenLineage, if it is enabled. ``openlineage.py`` converts them to OpenLineage's classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from airflow_pgchange import tubes
from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.feed import Feed, OfTables
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.utils.outcome import Table, resolved


@dataclass(frozen=True)
class Backfilled:
    """The tables that a backfill touched, and the workers of its tube."""

    conninfo: str = field(repr=False)
    tables: Sequence[Table]
    workers: Sequence[TubeFeed]


def is_on() -> bool:
    """Whether OpenLineage's provider is installed, is enabled, and has a transport for its events."""
    try:
        from airflow.providers.openlineage import conf  # noqa: PLC0415
    except ImportError:
        return False
    return not conf.is_disabled()


def sources(feed: Feed, conninfo: str) -> list[Table]:
    """Return the tables whose changes a feed reads. Empty if the feed has no tables, or if the role may not see them."""
    if not isinstance(feed, OfTables):
        return []
    try:
        with connect(conninfo) as connection:
            return [(connection.info.dbname, schema, name) for schema, name in ask(connection, feed.tables())]
    except (PgChangeError, psycopg.Error):
        return []


def backfilled(
    conninfo: str, connection: psycopg.Connection[Any], tube: str, tables: Iterable[str]
) -> Backfilled | None:
    """Return the tables of a finished backfill, and the workers of its tube.

    None if they cannot be read, for example because a table was renamed meanwhile. Lineage must not fail the task.
    """
    try:
        touched = [resolved(connection, table) for table in tables]
        return Backfilled(conninfo, touched, tubes.workers(connection, tube))
    except (PgChangeError, psycopg.Error):
        return None
