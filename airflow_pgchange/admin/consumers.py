"""The consumers of every kind of feed, by the names that status shows."""

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
from airflow_pgchange.feeds.feed import Feed, Movable, kinds, progress_at
from airflow_pgchange.feeds.names import prefix_of
from airflow_pgchange.feeds.queries import ask, records, rows
from airflow_pgchange.messages import queues

log = logging.getLogger(__name__)

REGISTERED = "select kind from pgchange.registered where kind is not null order by kind"

Connection = psycopg.Connection[Any]
Row = dict[str, Any]


def named(name: str) -> Callable[[Connection], Feed]:
    """The consumer that a name means: its feed, once the database of the changes told what the name does not say.

    Raises InvalidArgument where it means none. The returned function raises UnknownConsumer for a tube that is not there.
    """
    kind, parts = _read(name)
    return lambda source: kind.named(partial(ask, source), *parts)


def movable(name: str) -> Movable:
    """The feed of a consumer that can be repaired, moved and dropped: its name says all. Raises InvalidArgument for any
    other."""
    kind, parts = _read(name)
    if kind.names.instead:
        raise InvalidArgument(f"{name} has no watermark to repair, move or drop: {kind.names.instead}")
    return cast(Movable, kind.named(_nobody, *parts))


def _nobody(query: sql.Composed) -> None:
    raise AssertionError(f"the name of a consumer that can be moved says all: {query.as_string(None)}")


def _read(name: str) -> tuple[type[Feed], tuple[str, ...]]:
    """The kind whose prefix a name has, and the parts of the name."""
    by_prefix: dict[str, type[Feed]] = {
        kind.names.prefix: kind for kind in kinds().values() if hasattr(kind, "names")
    }
    kind = by_prefix.get(prefix_of(name))
    parts = None if kind is None else kind.names.read(name)
    if kind is None or parts is None:
        known = ", ".join(kind.names.example for kind in by_prefix.values())
        raise InvalidArgument(f"{name!r} is not a consumer: write it as status names it, such as {known}")
    return kind, parts


def status(
    results: Connection, source: Connection | None = None, warn: Callable[[str], None] = log.warning
) -> list[Row]:
    """A row for each consumer of every kind, as ``pgchange.status()`` has it; ``ready`` is exact up to 1,000.

    ``results`` holds their progress, ``source`` the changes of those whose changes are elsewhere. The lag is None where
    the source was not asked, or where a person must decide first, which ``held_back_by`` then says. Kinds that the role
    may not see are left out, and ``warn`` is told; so it is of sagas that are stuck. Raises SchemaMissing where neither
    has any of our schemas, PermissionDenied where the role may see no kind.
    """
    changes = source or results
    held = {one: versions.present(one) for one in (results, changes)}
    if not any(held.values()):
        raise SchemaMissing("our schemas are not in this database: run `airflow-pgchange install` on it")
    found: list[Row] = []
    left_out: dict[str, Exception] = {}
    asked = [one for one in held if "core" in held[one]]
    registered = [(kind, one) for one in asked for kind in _registered(one, results, changes)]
    for kind, one in registered:
        try:
            told = records(one, "select * from pgchange.status(of_kind => %s)", [kind])
            found += told if source is None else [_completed(results, source, row) for row in told]
        except ServerUnavailable:
            raise
        except (PgChangeError, psycopg.Error) as error:
            left_out[kind] = error
    denied = [why for why in left_out.values() if isinstance(why, PermissionDenied)]
    if registered and len(denied) == len(registered):
        raise denied[0]
    for kind, why in left_out.items():
        warn(f"consumers of kind {kind} are left out: {why}")
    if "mbus" in held[changes]:
        with suppress(PermissionDenied):
            for line in queues.stuck_sagas(changes):
                warn(line)
    return found


def _registered(connection: Connection, results: Connection, changes: Connection) -> list[str]:
    """The kinds whose progress is in this database: of one that this package does not know, with the results."""
    registered = [kind for (kind,) in rows(connection, REGISTERED)]
    homes = {kind: progress_at(cast(Feed, feed), results, changes) for kind, feed in kinds().items()}
    return [kind for kind in registered if homes.get(kind, results) is connection]


def _completed(results: Connection, source: Connection, row: Row) -> Row:
    """A row with what only the database of the changes can tell, where that is another."""
    kind = kinds().get(row["kind"])
    is_here = row["elsewhere"] != "changes" and (source is results or row["version"] or row["ready"])
    if kind is None or kind.progress == "source" or (row["ready"] is not None and is_here):
        return row
    return row | {"held_back_by": None} | elsewhere(results, source, kind.of_status(row["feed"]))
