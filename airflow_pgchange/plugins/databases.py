"""The databases that the page shows: those that parsed DAGs name, and those of ``[pgchange] connections``."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from airflow.configuration import conf
from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.serialized_dag import SerializedDagModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds.feed import BEGINNING, Movable, Watched
from airflow_pgchange.feeds.feed_kinds import from_uri
from airflow_pgchange.plugins.spark_tasks import SparkNeeds, spark_needs
from airflow_pgchange.plugins.watched_assets import Clash, WatchedAsset, clashes, unwrapped, watched_assets
from airflow_pgchange.utils.arguments import watched_of

log = logging.getLogger(__name__)

OURS = "airflow_pgchange."
Key = tuple[str, str]
"""The kind and the name of a feed: of a consumer, or of a feed that stands for many consumers."""


@dataclass(frozen=True, order=True)
class Place:
    """The databases of a consumer: ``connection`` has the results. ``source`` has the changes, if it is a different
    database."""

    connection: str
    source: str | None = None

    @property
    def connections(self) -> list[str]:
        return [self.connection] if self.source is None else [self.connection, self.source]


@dataclass(frozen=True)
class Named:
    """A place that a task or an asset of a DAG names, and the consumer with its feed, if it names a consumer.

    ``task_id`` is the task if it claims batches, and ``start`` the position at which it starts a new consumer. Both are
    None for other tasks and for assets. ``targets`` are the names of the task's outlets.
    """

    place: Place
    consumer: str | None
    start: str | None = None
    task_id: str | None = None
    feed: Watched | None = field(default=None, compare=False)
    targets: tuple[str, ...] = field(default=(), compare=False)


@dataclass
class Naming:
    """The uses of a consumer by DAGs.

    ``starts`` are the positions at which tasks start it if it is new. ``tasks`` claim its batches, and ``targets`` are
    the names of their outlets, each with the id of the DAG.
    """

    feed: Watched
    dags: set[str] = field(default_factory=set)
    starts: set[str] = field(default_factory=set)
    tasks: set[tuple[str, str]] = field(default_factory=set)
    targets: set[tuple[str, str]] = field(default_factory=set)

    @property
    def start(self) -> str:
        """The position at which a new consumer starts. If tasks name several, the first in alphabetical order."""
        return min(self.starts, default=BEGINNING)


@dataclass
class Places:
    """The databases and consumers that DAGs name.

    ``dags`` has the DAGs that use each connection, and ``consumers`` the consumers of each place. ``kinds`` has the DAGs
    that wait for every consumer of a kind at a place. ``paused`` are the paused DAGs among all these. ``clashes`` are the
    assets to which DAGs give different watchers.
    """

    dags: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    consumers: dict[Place, dict[Key, Naming]] = field(default_factory=lambda: defaultdict(dict))
    kinds: dict[tuple[Place, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    paused: set[str] = field(default_factory=set)
    clashes: list[Clash] = field(default_factory=list)

    def add(self, dag_id: str, named: Named) -> None:
        for connection in named.place.connections:
            self.dags[connection].add(dag_id)
        if named.feed is None:
            return
        key = named.feed.kind, named.feed.name
        naming = self.consumers[named.place].setdefault(key, Naming(named.feed))
        naming.dags.add(dag_id)
        if named.start is not None:
            naming.starts.add(named.start)
        if named.task_id is not None:
            naming.tasks.add((dag_id, named.task_id))
            naming.targets.update((dag_id, target) for target in named.targets)
        if named.feed.covers is not None:
            self.kinds[named.place, named.feed.covers].add(dag_id)

    def naming(self, place: Place, kind: str, consumer: str) -> set[str]:
        """Return the DAGs that name a consumer, or wait for all consumers of its kind."""
        naming = self.consumers[place].get((kind, consumer))
        return (set() if naming is None else naming.dags) | self.kinds.get((place, kind), set())

    def home(self, connection: str, key: Key) -> Place:
        """Return the place by which DAGs name a consumer whose results are at a connection."""
        places = [Place(connection), *self.elsewhere(connection)]
        return next((place for place in places if key in self.consumers[place]), places[0])

    def has(self, place: Place) -> bool:
        """Whether DAGs name this connection, and name it with this source."""
        return place.connection in self.dags and (place.source is None or place in self.consumers)

    def elsewhere(self, connection: str) -> list[Place]:
        """Return the places with their results at a connection and their changes in another database."""
        return sorted(
            (
                place
                for place in self.consumers
                if place.connection == connection and place.source is not None
            ),
            key=lambda place: str(place.source),
        )


@dataclass(frozen=True)
class ParsedDag:
    """The places that a DAG names, its assets with watchers, and the needs of its Spark tasks."""

    named: list[Named]
    assets: list[WatchedAsset]
    spark: list[SparkNeeds] = field(default_factory=list)

    @classmethod
    def of(cls, serialized: Any) -> ParsedDag:
        return cls(
            each_once(named_in(serialized)),
            list(dict.fromkeys(watched_assets(serialized))),
            list(dict.fromkeys(spark_needs(serialized))),
        )


class ParsedDags:
    """The contents of all parsed DAGs. A DAG is read again only when it has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parsed: dict[str, tuple[str, ParsedDag]] = {}
        self._logged: set[str] = set()

    def places(self, session: Session) -> Places:
        """Return the databases and consumers that DAGs and the configuration name now."""
        places = Places()
        # Airflow 3.1 reads an empty option as a list with an empty text.
        for connection in filter(None, conf.getlist("pgchange", "connections", fallback=[])):
            places.dags[connection] = set()
        parsed = self._read(session)
        for dag_id, (dag, is_paused) in parsed.items():
            for named in dag.named:
                places.add(dag_id, named)
            if dag.named and is_paused:
                places.paused.add(dag_id)
        places.clashes = clashes({dag_id: dag.assets for dag_id, (dag, _) in parsed.items()})
        self._log(places.clashes)
        return places

    def parsed(self, session: Session) -> dict[str, ParsedDag]:
        """Return the present content of each DAG."""
        return {dag_id: dag for dag_id, (dag, _) in self._read(session).items()}

    def _log(self, current: list[Clash]) -> None:
        """Log each clash once, and again if it comes back."""
        messages = {clash.description() for clash in current}
        with self._lock:
            new, self._logged = messages - self._logged, messages
        for message in sorted(new):
            log.warning("%s", message)

    def _read(self, session: Session) -> dict[str, tuple[ParsedDag, bool]]:
        """Return the present content of each DAG, and whether it is paused."""
        latest = {dag_id: row for dag_id, *row in session.execute(_latest())}
        with self._lock:
            for dag_id in self._parsed.keys() - latest.keys():
                del self._parsed[dag_id]
            for dag_id, (number, digest, _) in latest.items():
                if self._parsed.get(dag_id, ("",))[0] != digest:
                    row = session.get(SerializedDagModel, number)
                    self._parsed[dag_id] = (digest, ParsedDag.of(None if row is None else row.data))
            return {
                dag_id: (self._parsed[dag_id][1], is_paused) for dag_id, (*_, is_paused) in latest.items()
            }


def each_once(named: Iterable[Named]) -> list[Named]:
    """Remove duplicates. Two different feeds may have the same name, so the feed is compared, too."""
    return list({(each, each.feed): each for each in named}.values())


def named_in(node: Any, ours: bool = False) -> Iterator[Named]:
    """Yield the places that a serialized DAG, or a part of it, names. Templates are skipped: their values are unknown."""
    if isinstance(node, Mapping):
        ours = ours or any(str(node.get(key)).startswith(OURS) for key in ("_task_module", "classpath"))
        if "postgres_conn_id" in node and (ours or "feed" in node):
            place = _place(node["postgres_conn_id"], node.get("source_conn_id"))
            if place is not None:
                feed, start = _feed(unwrapped(node.get("feed")))
                yield _named(place, feed, start, _claiming(node), _targets(node))
        if str(node.get("uri")).startswith("pgchange://") and not node.get("watchers"):
            with suppress(PgChangeError):
                feed, connection = from_uri(node["uri"])
                yield _named(Place(connection), feed)
        for value in node.values():
            yield from named_in(value, ours)
    elif isinstance(node, list):
        for value in node:
            yield from named_in(value, ours)


def _latest() -> Any:
    """Return the query for all serialized versions of DAGs. The rows of a DAG are in order, the newest version last."""
    return (
        select(
            SerializedDagModel.dag_id, SerializedDagModel.id, SerializedDagModel.dag_hash, DagModel.is_paused
        )
        .join(DagVersion, SerializedDagModel.dag_version_id == DagVersion.id)
        .join(DagModel, DagModel.dag_id == SerializedDagModel.dag_id)
        .where(DagModel.is_stale.is_(False))
        .order_by(SerializedDagModel.dag_id, DagVersion.version_number)
    )


def _place(connection: Any, source: Any) -> Place | None:
    names = [name for name in (connection, source) if name]
    if not connection or any(not isinstance(name, str) or "{{" in name for name in names):
        return None
    return Place(connection, None if not source or source == connection else source)


def _claiming(node: Mapping[str, Any]) -> str | None:
    """Return the id of a serialized task if the task claims batches, else None. Sensors only wait for batches."""
    module = node.get("_task_module")
    claims = module is not None and not str(module).startswith(f"{OURS}sensors.")
    return str(node.get("task_id")) if claims else None


def _targets(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the assets that are a task's outlets."""
    outlets = unwrapped(node.get("outlets") or [])
    return tuple(str(each["name"]) for each in outlets if isinstance(each, Mapping) and each.get("name"))


def _named(
    place: Place,
    feed: Watched | None,
    start: str | None = None,
    task_id: str | None = None,
    targets: tuple[str, ...] = (),
) -> Named:
    if feed is None:
        return Named(place, None)
    return Named(place, feed.name, None if task_id is None else start, task_id, feed, targets)


def _feed(value: Any) -> tuple[Watched | None, str | None]:
    """Return the feed of a task, and the position at which the task starts a new consumer. Each may be None.

    If the start is a template, its text is returned, and the feed has no start.
    """
    template = str(value.get("start")) if isinstance(value, Mapping) else ""
    if "{{" in template:
        value = {name: field for name, field in value.items() if name != "start"}
    else:
        template = ""
    try:
        feed = watched_of(value)
    except (PgChangeError, TypeError):
        return None, None
    return feed, (template or str(feed.start)) if isinstance(feed, Movable) else None
