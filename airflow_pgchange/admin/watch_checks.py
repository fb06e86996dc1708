"""Check whether feeds can be watched, and list watched feeds that cannot be."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg

from airflow_pgchange.admin.versions import SYSTEMS, demand_version, present
from airflow_pgchange.errors import PermissionDenied, PgChangeError, SchemaMissing
from airflow_pgchange.feeds.connections import read_only
from airflow_pgchange.feeds.feed import NOWHERE, Watched, progress_at
from airflow_pgchange.feeds.queries import ask, rows

BLIND = "select consumer, told from pgchange.watchers_health() order by consumer, told"

Connection = psycopg.Connection[Any]


def hindrance(results: Connection, source: Connection, feed: Watched) -> str | None:
    """Return the reason why a feed cannot be watched, with advice; None if it can.

    Runs the queries of a watcher in a read-only transaction, because watching an event group on a primary dispatches
    events.
    """
    progress = progress_at(feed, results, source)
    try:
        _demand_versions(progress, feed)
        _demand_versions(source, feed)
        at = ask(progress, feed.position())
        with read_only(source):
            ask(source, feed.lag(at or NOWHERE, 1))
        ask(progress, feed.locked())
    except (PgChangeError, psycopg.Error) as error:
        return str(error).strip()
    return None


def blind(connection: Connection) -> list[str]:
    """Return a line for each feed that its watcher cannot watch: the watcher, since when and why, as in ``health``."""
    try:
        return [f"{feed}: {reason}" for feed, reason in rows(connection, BLIND)]
    except (PermissionDenied, SchemaMissing):
        return []


def _demand_versions(connection: Connection, feed: Watched) -> None:
    """Raise SchemaVersionMismatch if the feed's schema, or a schema that it depends on, has another version.

    A missing schema is not checked here, because the feed's own query reports it.
    """
    own = next((system for system in SYSTEMS if system.schema == getattr(feed, "schema", None)), None)
    if own is not None:
        folders = present(connection)
        for system in SYSTEMS:
            if system.folder in folders and (system is own or system.folder in own.needs):
                # Skip versions that the role may not read: a watcher does not need them.
                with suppress(PermissionDenied):
                    demand_version(connection, system)
