"""Whether feeds can be watched, and which of those that are watched cannot."""

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
    """What keeps a feed from being watched, with what to do; None where nothing does. It asks what a watcher asks, and
    writes nothing: on a primary a look at an event group would dispatch events."""
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
    """Of each feed that cannot be watched: by whom, since when and why, as ``pgchange.health()`` says it."""
    try:
        return [f"{feed}: {told}" for feed, told in rows(connection, BLIND)]
    except (PermissionDenied, SchemaMissing):
        return []


def _demand_versions(connection: Connection, feed: Watched) -> None:
    """Raise SchemaVersionMismatch where the feed's schema, or one that it needs, is not as this package makes it. Of one
    that is not there the feed's own query tells."""
    own = next((system for system in SYSTEMS if system.schema == getattr(feed, "schema", None)), None)
    if own is not None:
        held = present(connection)
        for system in SYSTEMS:
            if system.folder in held and (system is own or system.folder in own.needs):
                # What a role may not read is not in its way.
                with suppress(PermissionDenied):
                    demand_version(connection, system)
