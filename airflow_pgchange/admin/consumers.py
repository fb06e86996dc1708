"""The consumers of all kinds of feeds, by the names that ``status`` shows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import psycopg
from psycopg import sql

from airflow_pgchange.admin import versions
from airflow_pgchange.admin.remote_status import elsewhere
from airflow_pgchange.errors import (
    InvalidArgument,
    PermissionDenied,
    PgChangeError,
    SchemaMissing,
    ServerUnavailable,
)
from airflow_pgchange.feeds.consumer_names import prefix_of
from airflow_pgchange.feeds.feed import Feed, Movable, progress_at
from airflow_pgchange.feeds.feed_kinds import kinds
from airflow_pgchange.feeds.queries import ask, records, rows
from airflow_pgchange.messages import queues

log = logging.getLogger(__name__)

REGISTERED = "select kind from pgchange.registered where kind is not null order by kind"

Connection = psycopg.Connection[Any]
Row = dict[str, Any]


def named(name: str) -> Callable[[Connection], Feed]:
    """Return a function that gets the feed of a named consumer from the database of the changes.

    The database has the settings that the name does not contain. Raises InvalidArgument for an invalid name. The returned
    function raises UnknownConsumer if the tube does not exist.
    """
    kind, parts = _read(name)
    return lambda source: kind.named(partial(ask, source), *parts)


def movable(name: str) -> Movable:
    """Return the feed of a consumer that can be repaired, moved and dropped. The name alone determines the feed.

    Raises InvalidArgument if the name is invalid, or if this kind of consumer cannot be moved.
    """
    kind, parts = _read(name)
    if kind.names.instead:
        raise InvalidArgument(f"{name} has no watermark to repair, move or drop: {kind.names.instead}")
    return cast(Movable, kind.named(_no_query, *parts))


def _no_query(query: sql.Composed) -> None:
    raise AssertionError(f"the name of a movable consumer needs no query: {query.as_string(None)}")


def _read(name: str) -> tuple[type[Feed], tuple[str, ...]]:
    """Return the kind of feed whose prefix the name has, and the parts of the name. Raises InvalidArgument."""
    by_prefix: dict[str, type[Feed]] = {
        kind.names.prefix: kind for kind in kinds().values() if hasattr(kind, "names")
    }
    kind = by_prefix.get(prefix_of(name))
    parts = None if kind is None else kind.names.read(name)
    if kind is None or parts is None:
        examples = ", ".join(kind.names.example for kind in by_prefix.values())
        raise InvalidArgument(f"{name!r} is not a consumer: write it as status names it, such as {examples}")
    return kind, parts


def status(
    results: Connection, source: Connection | None = None, warn: Callable[[str], None] = log.warning
) -> list[Row]:
    """Return a row for each consumer of all kinds, with the columns of ``pgchange.status()``. ``ready`` is exact up to
    1,000.

    ``results`` is the database with the progress; ``source`` is the database of the changes, if it is another. The lag is
    None if no source is given, or if a person must decide first; then ``held_back_by`` has the reason. Kinds that the
    role may not see are left out. ``warn`` gets a message for each of them, and for each stuck saga.

    Raises SchemaMissing if neither database has one of our schemas, and PermissionDenied if the role may see no kind.
    """
    changes = source or results
    installed = {connection: versions.present(connection) for connection in (results, changes)}
    if not any(installed.values()):
        raise SchemaMissing("our schemas are not in this database: run `airflow-pgchange install` on it")
    consumers: list[Row] = []
    left_out: dict[str, Exception] = {}
    with_core = [connection for connection, systems in installed.items() if "core" in systems]
    registered = [
        (kind, connection) for connection in with_core for kind in _registered(connection, results, changes)
    ]
    for kind, connection in registered:
        try:
            of_kind = records(connection, "select * from pgchange.status(of_kind => %s)", [kind])
            consumers += of_kind if source is None else [_completed(results, source, row) for row in of_kind]
        except ServerUnavailable:
            raise
        except (PgChangeError, psycopg.Error) as error:
            left_out[kind] = error
    denied = [reason for reason in left_out.values() if isinstance(reason, PermissionDenied)]
    if registered and len(denied) == len(registered):
        raise denied[0]
    for kind, reason in left_out.items():
        warn(f"consumers of kind {kind} are left out: {reason}")
    if "mbus" in installed[changes]:
        with suppress(PermissionDenied):
            for line in queues.stuck_sagas(changes):
                warn(line)
    return consumers


def _registered(connection: Connection, results: Connection, changes: Connection) -> list[str]:
    """Return the kinds whose progress is in this database. A kind unknown to this package has it in ``results``."""
    registered = [kind for (kind,) in rows(connection, REGISTERED)]
    homes = {kind: progress_at(cast(Feed, feed), results, changes) for kind, feed in kinds().items()}
    return [kind for kind in registered if homes.get(kind, results) is connection]


def _completed(results: Connection, source: Connection, row: Row) -> Row:
    """Return a row with lag and batch from the source, if the progress is in another database and they are missing."""
    kind = kinds().get(row["kind"])
    is_here = row["elsewhere"] != "changes" and (source is results or row["version"] or row["ready"])
    if kind is None or kind.progress == "source" or (row["ready"] is not None and is_here):
        return row
    return row | {"held_back_by": None} | elsewhere(results, source, kind.of_status(row["feed"]))
