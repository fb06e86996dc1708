"""What a person does with a consumer of any feed, by the name that status shows: look, skip, repair, move, drop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import psycopg

from airflow_pgchange import queues, schema, tubes
from airflow_pgchange.feeds import catalogues, consumers, groups
from airflow_pgchange.feeds.commit import CommitFeed
from airflow_pgchange.feeds.errors import InvalidArgument, PermissionDenied, SchemaMissing
from airflow_pgchange.feeds.event import EventFeed
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.queue import QueueFeed
from airflow_pgchange.feeds.topology import TopologyFeed

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Moves:
    """What can be done with consumers that have a progress of their own; ``move`` takes a time, "beginning" or "now"."""

    repair: Callable[[Connection, Connection, Any], str]
    move: Callable[[Connection, Connection, Any, datetime | str], None]
    drop: Callable[[Connection, Connection, Any], None]


Named = Callable[[Connection], Feed]
"""A feed whose name was read; the database of the changes is asked for what the name does not say."""


@dataclass(frozen=True)
class Consumer:
    name: str
    feed: Named


@dataclass(frozen=True)
class Movable(Consumer):
    moves: Moves


@dataclass(frozen=True)
class Kind:
    """Consumers of one kind of feed. ``named`` gets a name without ``prefix``, and returns None for one that is none.
    ``instead``: what to do where there is nothing to repair, move or drop."""

    system: str
    prefix: str
    example: str
    named: Callable[[str], Named | None]
    status: Callable[[Connection, Connection], list[Row]]
    moves: Moves | None
    instead: str = ""


def consumer(name: str) -> Consumer:
    """The consumer that a name means. Raises InvalidArgument where it means none."""
    return Consumer(name, _read(name)[1])


def movable(name: str) -> Movable:
    """The same, of those that can be repaired, moved and dropped. Raises InvalidArgument for any other."""
    kind, feed = _read(name)
    if kind.moves is None:
        raise InvalidArgument(f"{name} has no watermark to repair, move or drop: {kind.instead}")
    return Movable(name, feed, kind.moves)


def _read(name: str) -> tuple[Kind, Named]:
    kind = next(kind for kind in KINDS if name.startswith(kind.prefix))
    feed = kind.named(name.removeprefix(kind.prefix))
    if feed is None:
        known = ", ".join(kind.example for kind in KINDS)
        raise InvalidArgument(f"{name!r} is no consumer: write it as status names it, such as {known}")
    return kind, feed


def status(results: Connection, source: Connection, warn: Callable[[str], None] = log.warning) -> list[Row]:
    """A row for each consumer of every kind, its name as ``consumer``; ages in seconds, ``ready`` exact up to 1,000.

    ``results`` holds their progress, ``source`` the changes of those whose changes are elsewhere. Kinds that the role
    may not see are left out, and ``warn`` is told. Raises SchemaMissing where neither has any of our schemas,
    PermissionDenied where the role may see no kind.
    """
    held = {system for connection in (results, source) for system in schema.present(connection)}
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
    if denied and len(denied) == len(kinds):
        raise denied[0]
    return found


def skip(results: Connection, source: Connection, consumer: Consumer, reason: str) -> str:
    """Give up the batch that a consumer claimed and cannot finish; it becomes a dead letter. Returns the batch's id.

    Raises BatchNotFinished where there is none, ConsumerBusy while the consumer is at work.
    """
    return consumers.skip(results, source, consumer.feed(source), reason)


def _commits(results: Connection, source: Connection) -> list[Row]:
    return [
        {
            "consumer": f"{one.consumer_id}/{one.branch_id}",
            **_without(asdict(one), "consumer_id", "branch_id", "version"),
        }
        for one in consumers.status(results, source)
    ]


def _groups(results: Connection, source: Connection) -> list[Row]:
    return [
        {"consumer": EventFeed(one["group_id"]).name, **_without(one, "group_id")}
        for one in groups.status(results, source)
    ]


def _workers(results: Connection, source: Connection) -> list[Row]:
    return [
        {"consumer": one.feed.name, **_without(asdict(one), "tube", "worker", "workers")}
        for one in tubes.status(source)
    ]


def _queues(results: Connection, source: Connection) -> list[Row]:
    return [
        {"consumer": one.feed.name, **_without(asdict(one), "queue", "name")} for one in queues.status(source)
    ]


def _catalogues(results: Connection, source: Connection) -> list[Row]:
    return [
        {
            "consumer": TopologyFeed(one["consumer_id"]).name,
            "waiting": 0,
            "faults": 0,
            **_without(one, "consumer_id", "version"),
        }
        for one in catalogues.status(results, source)
    ]


def _commit(name: str) -> Named | None:
    consumer_id, _, branch = name.rpartition("/")
    return (lambda _: CommitFeed(consumer_id, int(branch))) if consumer_id and branch.isdigit() else None


def _worker(name: str) -> Named | None:
    tube, _, worker = name.rpartition("/")
    return (lambda source: tubes.worker(source, tube, int(worker))) if tube and worker.isdigit() else None


def _group(name: str) -> Named | None:
    return (lambda _: EventFeed(name)) if name else None


def _queue(name: str) -> Named | None:
    queue, _, reader = name.rpartition("/")
    return (lambda _: QueueFeed(queue, reader)) if queue and reader else None


def _catalogue(name: str) -> Named | None:
    return (lambda _: TopologyFeed(name)) if name else None


def _without(row: Row, *left_out: str) -> Row:
    return {name: value for name, value in row.items() if name not in left_out}


KINDS: tuple[Kind, ...] = (
    Kind(
        "tube",
        "tube:",
        "tube:copies/0",
        _worker,
        _workers,
        None,
        "`airflow pgchange skip` gives up its batch, tube.tube_ensure_absent() removes a tube",
    ),
    Kind(
        "pgmb",
        "events:",
        "events:mails",
        _group,
        _groups,
        Moves(groups.repair, groups.move, groups.drop),
    ),
    Kind(
        "mbus",
        "queue:",
        "queue:orders/default",
        _queue,
        _queues,
        None,
        "`airflow pgchange skip` gives up its batch, mbus.drop_consumer() removes it",
    ),
    Kind(
        "topology",
        "topology:",
        "topology:watcher",
        _catalogue,
        _catalogues,
        Moves(catalogues.repair, catalogues.move, catalogues.drop),
    ),
    Kind(
        "pubsub",
        "",
        "delays/0",
        _commit,
        _commits,
        Moves(consumers.repair, consumers.move, consumers.drop),
    ),
)
"""By prefix; that of the commit queue has none and is last."""
