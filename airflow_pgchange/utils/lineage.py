"""What OpenLineage is to be told of, where somebody listens; ``openlineage.py`` says it in its words."""

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
    """Tables of which each row was touched for the workers of a tube."""

    conninfo: str = field(repr=False)
    tables: Sequence[Table]
    workers: Sequence[TubeFeed]


def is_on() -> bool:
    """Whether OpenLineage's provider is installed, and has somewhere to send what it is told."""
    try:
        from airflow.providers.openlineage import conf  # noqa: PLC0415
    except ImportError:
        return False
    return not conf.is_disabled()


def sources(feed: Feed, conninfo: str) -> list[Table]:
    """The tables whose changes a feed hands out; none where it is not of tables, or the role may not see which."""
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
    """What was touched for whom; None where that cannot be seen, such as of a table that was renamed: it was touched."""
    try:
        found = [resolved(connection, table) for table in tables]
        return Backfilled(conninfo, found, tubes.workers(connection, tube))
    except (PgChangeError, psycopg.Error):
        return None
