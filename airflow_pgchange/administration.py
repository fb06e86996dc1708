"""The consumers of every kind of feed, by the names that status shows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import psycopg

from airflow_pgchange import queues, schema, tubes
from airflow_pgchange.feeds.commit import CommitFeed
from airflow_pgchange.feeds.errors import InvalidArgument, PermissionDenied, SchemaMissing
from airflow_pgchange.feeds.event import EventFeed
from airflow_pgchange.feeds.feed import Feed, Movable
from airflow_pgchange.feeds.queries import ask, records
from airflow_pgchange.feeds.queue import QueueFeed
from airflow_pgchange.feeds.remote_status import elsewhere
from airflow_pgchange.feeds.topology import TopologyFeed

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """Consumers of one kind of feed, which the schemas of ``system`` hold.

    ``pattern`` matches their names; ``feed`` takes the database of the changes and the pattern's groups. ``status`` takes
    the database of their progress, and that of the changes or None. ``instead``: what to do where they cannot be moved.
    ``troubles``: what else of the database of the changes a person should look at.
    """

    system: str
    pattern: str
    example: str
    feed: Callable[..., Feed]
    status: Callable[[Connection, Connection | None], list[Row]]
    instead: str = ""
    troubles: Callable[[Connection], list[str]] = lambda changes: []


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
    """A row for each consumer of every kind, its name as ``consumer``; ages in seconds, ``ready`` exact up to 1,000.

    ``results`` holds their progress, ``source`` the changes of those whose changes are elsewhere. The lag is None where
    the source was not asked, or where a person must decide first, which ``held_back_by`` then says. Kinds that the role
    may not see are left out, and ``warn`` is told; so it is of sagas that are stuck. Raises SchemaMissing where neither
    has any of our schemas, PermissionDenied where the role may see no kind.
    """
    held = {system for connection in {results, source or results} for system in schema.present(connection)}
    if not held:
        raise SchemaMissing("our schemas are not in this database: run `airflow pgchange install` on it")
    kinds = [kind for kind in KINDS if kind.system in held]
    found: list[Row] = []
    denied: list[PermissionDenied] = []
    for kind in kinds:
        try:
            found += kind.status(results, source)
        except PermissionDenied as error:
            denied.append(error)
            warn(f"consumers such as {kind.example} are left out: {error}")
        else:
            for line in kind.troubles(source or results):
                warn(line)
    if denied and len(denied) == len(kinds):
        raise denied[0]
    return found


def _commits(results: Connection, source: Connection | None) -> list[Row]:
    rows = []
    for row in records(results, "select * from pubsub.status()"):
        feed = CommitFeed(row["consumer_id"], row["branch_id"], row["in_order"])
        if row["ready"] is None and source is not None:
            row.update(elsewhere(results, source, feed))
        rows.append(_named(feed, row, "consumer_id", "branch_id", "version", "txid"))
    return rows


def _groups(results: Connection, source: Connection | None) -> list[Row]:
    rows = []
    for row in records(results, "select * from pgmb.status()"):
        feed = EventFeed(row["group_id"])
        row["held_back_by"] = None
        if source not in (None, results):
            row.update(elsewhere(results, source, feed))
        rows.append(_named(feed, row, "group_id"))
    return rows


def _workers(results: Connection, source: Connection | None) -> list[Row]:
    found = tubes.status(source or results)
    return [_named(one.feed, asdict(one), "tube", "worker", "workers") for one in found]


def _readers(results: Connection, source: Connection | None) -> list[Row]:
    return [_named(one.feed, asdict(one), "queue", "name") for one in queues.status(source or results)]


def _watchers(results: Connection, source: Connection | None) -> list[Row]:
    rows = []
    for row in records(results, "select * from topology.status()"):
        feed = TopologyFeed(row["consumer_id"])
        if source not in (None, results):
            row.update({"held_back_by": None} | elsewhere(results, source, feed))
        elif source is None and ask(results, feed.mark()) is None:
            # Its catalogue is in another database: what this one misses is no reason to hold it back.
            row["held_back_by"] = None
        rows.append(_named(feed, {"waiting": 0, "faults": 0} | row, "consumer_id", "version"))
    return rows


def _named(feed: Feed, row: Row, *left_out: str) -> Row:
    return {"consumer": feed.name} | {name: value for name, value in row.items() if name not in left_out}


KINDS = (
    Kind(
        "tube",
        r"tube:(.+)/(\d+)",
        "tube:copies/0",
        lambda source, tube, worker: tubes.worker(source, tube, int(worker)),
        _workers,
        "`airflow pgchange skip` gives up its batch, tube.tube_ensure_absent() removes a tube",
    ),
    Kind("pgmb", "events:(.+)", "events:mails", lambda _, group: EventFeed(group), _groups),
    Kind(
        "mbus",
        "queue:(.+)/([^/]+)",
        "queue:orders/default",
        lambda _, queue, reader: QueueFeed(queue, reader),
        _readers,
        "`airflow pgchange skip` gives up its batch, mbus.drop_consumer() removes it",
        queues.stuck_sagas,
    ),
    Kind("topology", "topology:(.+)", "topology:watcher", lambda _, name: TopologyFeed(name), _watchers),
    Kind(
        "pubsub",
        r"(?!tube:|events:|queue:|topology:)(.+)/(\d+)",
        "delays/0",
        lambda _, name, branch: CommitFeed(name, int(branch)),
        _commits,
    ),
)
