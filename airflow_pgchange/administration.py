"""The consumers of every kind of feed, by the names that status shows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import psycopg

from airflow_pgchange import queues, schema, tubes
from airflow_pgchange.feeds.commit import CommitFeed
from airflow_pgchange.feeds.errors import (
    InvalidArgument,
    PermissionDenied,
    PgChangeError,
    SchemaMissing,
    ServerUnavailable,
)
from airflow_pgchange.feeds.event import EventFeed
from airflow_pgchange.feeds.feed import FEEDS, Feed, Movable, from_json, progress_at
from airflow_pgchange.feeds.queries import records, rows
from airflow_pgchange.feeds.queue import QueueFeed
from airflow_pgchange.feeds.remote_status import elsewhere
from airflow_pgchange.feeds.topology import TopologyFeed

log = logging.getLogger(__name__)

REGISTERED = "select kind from pgchange.registered where kind is not null order by kind"

Connection = psycopg.Connection[Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """Consumers of one kind of feed.

    ``pattern`` matches their names; ``feed`` takes the database of the changes and the pattern's groups. ``instead``:
    what to do where they cannot be moved.
    """

    pattern: str
    example: str
    feed: Callable[..., Feed]
    instead: str = ""


def named(name: str) -> Callable[[Connection], Feed]:
    """The consumer that a name means: its feed, once the database of the changes told what the name does not say.

    Raises InvalidArgument where it means none. The returned function raises UnknownConsumer for a tube that is not there.
    """
    kind, parts = _read(name)
    return lambda source: kind.feed(source, *parts)


def movable(name: str) -> Movable:
    """The feed of a consumer that can be repaired, moved and dropped: its name says all. Raises InvalidArgument for any
    other."""
    kind, parts = _read(name)
    if kind.instead:
        raise InvalidArgument(f"{name} has no watermark to repair, move or drop: {kind.instead}")
    return cast(Movable, kind.feed(None, *parts))


def _read(name: str) -> tuple[Kind, tuple[str, ...]]:
    for kind in KINDS:
        match = re.fullmatch(kind.pattern, name, re.DOTALL)
        if match is not None:
            return kind, match.groups()
    known = ", ".join(kind.example for kind in KINDS)
    raise InvalidArgument(f"{name!r} is not a consumer: write it as status names it, such as {known}")


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
    held = {one: schema.present(one) for one in (results, changes)}
    if not any(held.values()):
        raise SchemaMissing("our schemas are not in this database: run `airflow pgchange install` on it")
    found: list[Row] = []
    left_out: dict[str, Exception] = {}
    asked = [one for one in held if "core" in held[one]]
    kinds = [(kind, one) for one in asked for kind in _kinds(one, results, changes)]
    for kind, one in kinds:
        try:
            told = records(one, "select * from pgchange.status(of_kind => %s)", [kind])
            found += told if source is None else [_completed(results, source, row) for row in told]
        except ServerUnavailable:
            raise
        except (PgChangeError, psycopg.Error) as error:
            left_out[kind] = error
    denied = [why for why in left_out.values() if isinstance(why, PermissionDenied)]
    if kinds and len(denied) == len(kinds):
        raise denied[0]
    for kind, why in left_out.items():
        warn(f"consumers of kind {kind} are left out: {why}")
    if "mbus" in held[changes]:
        with suppress(PermissionDenied):
            for line in queues.stuck_sagas(changes):
                warn(line)
    return found


def _kinds(connection: Connection, results: Connection, changes: Connection) -> list[str]:
    """The kinds whose progress is in this database: of one that this package does not know, with the results."""
    registered = [kind for (kind,) in rows(connection, REGISTERED)]
    homes = {kind: progress_at(cast(Feed, feed), results, changes) for kind, feed in FEEDS.items()}
    return [kind for kind in registered if homes.get(kind, results) is connection]


def _completed(results: Connection, source: Connection, row: Row) -> Row:
    """A row with what only the database of the changes can tell, where that is another."""
    if row["kind"] not in FEEDS:
        return row
    feed = cast(Feed, from_json({"kind": row["kind"], **row["feed"]}))
    is_here = row["elsewhere"] != "changes" and (source is results or row["version"] or row["ready"])
    if feed.progress == "source" or (row["ready"] is not None and is_here):
        return row
    return row | {"held_back_by": None} | elsewhere(results, source, feed)


KINDS = (
    Kind(
        r"tube:(.+)/(\d+)",
        "tube:copies/0",
        lambda source, tube, worker: tubes.worker(source, tube, int(worker)),
        "`airflow pgchange skip` gives up its batch, tube.tube_ensure_absent() removes a tube",
    ),
    Kind("events:(.+)", "events:mails", lambda _, group: EventFeed(group)),
    Kind(
        "queue:(.+)/([^/]+)",
        "queue:orders/default",
        lambda _, queue, reader: QueueFeed(queue, reader),
        "`airflow pgchange skip` gives up its batch, mbus.drop_consumer() removes it",
    ),
    Kind("topology:(.+)", "topology:watcher", lambda _, name: TopologyFeed(name)),
    Kind(
        r"(?!tube:|events:|queue:|topology:)(.+)/(\d+)",
        "delays/0",
        lambda _, name, branch: CommitFeed(name, int(branch)),
    ),
)
