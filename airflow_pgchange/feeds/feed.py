"""The contract of a feed: frozen values that build queries and read rows, and do no I/O.

``lag`` tells how far a consumer is behind, ``claim`` takes its next batch, ``partitions`` reads that, ``ack`` records it.
A query that a feed builds is complete, without parameters, and returns one row with one JSON column. ``results`` is the
database where results go, ``source`` the one that holds the changes, and ``progress`` the one of the two that holds the
consumer's lock and progress.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, runtime_checkable
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.batch import Batch, Change, Partition, Slice, grouped
from airflow_pgchange.feeds.names import Names, prefix_of
from airflow_pgchange.feeds.queries import together

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type[Any])
Ask = Callable[[sql.Composed], Any]
Position = Mapping[str, Any]
Goal = Mapping[str, Any]
"""What a consumer should come to: a point of its feed."""
BEGINNING = "beginning"
"""The start of a consumer before all that the source has."""
NOWHERE: Position = {}
"""The position of a consumer that has not begun: everything there ever was is before it."""


@runtime_checkable
class Watched(Protocol):
    """What triggers and sensors ask of everything that can be waited for."""

    kind: ClassVar[str]
    progress: ClassVar[Literal["results", "source"]]
    """Where the consumer's lock and progress are kept."""
    covers: ClassVar[str | None]
    """The kind of which it waits for every consumer; None where it waits for one, or for none."""

    @property
    def name(self) -> str:
        """The consumer and what it reads, for people: in messages, logs and metrics."""

    def position(self) -> sql.Composed:
        """progress: the consumer's progress, or null where it has none yet."""

    def lag(self, position: Position, upto: int) -> sql.Composed:
        """source, any server: the fields of ``Lag``. Its cost grows with ``upto``, not with backlog or history."""

    def locked(self) -> sql.Composed:
        """progress: whether any transaction holds the consumer's lock, without taking it."""


@runtime_checkable
class Shared(Protocol):
    """What a kind of feeds can do besides: tell of many of it for less than by ``lag`` of each."""

    @classmethod
    def lags(cls, asked: Sequence[tuple[Any, Position, int]]) -> sql.Composed:
        """source, any server: an array of the ``lag`` of each, in their order; it fails where one of those does."""


@runtime_checkable
class Feed(Watched, Protocol):
    """What the consumer transaction and Spark ask of every feed besides."""

    schema_version: ClassVar[int]
    """The version of the SQL that the feed's queries call."""
    sharded: ClassVar[bool]
    """Whether the changes are of shards, whose numbers begin the ends of a batch's slices."""
    columns: ClassVar[tuple[tuple[str, str], ...]]
    """Name and PostgreSQL type of what ``partitions`` selects; ``id`` is first."""
    names: ClassVar[Names]
    """How status names its consumers."""

    @classmethod
    def named(cls, ask: Ask, *parts: str) -> Self:
        """The feed of the consumer that ``names`` read so; ``ask`` is answered by the database of the changes, where the
        name does not say all: of one that can be moved it does."""

    @classmethod
    def of_status(cls, feed: Mapping[str, Any]) -> Self:
        """The feed of a consumer, by the column ``feed`` of its row of ``pgchange.status()``."""

    def register(self) -> sql.Composed:
        """progress: make this consumer's progress if it is not there yet; in a transaction of its own."""

    def lock(self) -> sql.Composed:
        """progress: true if this transaction now holds the consumer's lock, false if another does."""

    def choose(self, position: Position, limit: int) -> sql.Composed | None:
        """source, a standby: the next batch as it can be read there, or None for a feed that reads the primary only."""

    def claim(
        self, position: Position, limit: int, choice: Mapping[str, Any] | None, max_attempts: int | None
    ) -> sql.Composed:
        """source, primary: record and return the next batch, or the one in work again; null where nothing is ready. One
        that has failed ``max_attempts`` times is refused, uncounted."""

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        """source, any server: the function call that returns the changes of a slice of the batch, in order: what
        ``partitions`` selects from."""

    def change(self, row: Mapping[str, Any]) -> Change:
        """The change that a row of a partition is."""

    def point(self) -> sql.Composed:
        """source, primary: everything that is committed now, as a goal."""

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        """source, primary: ``{passed, goal}``: whether a consumer at ``position`` has come to the goal, and the goal to
        ask with the next time, when it is cheaper."""

    def ack(self, batch: Batch) -> sql.Composed:
        """progress: record the batch as processed; a ``StaleClaim`` if the progress is not where the claim found it."""

    def in_work(self, position: Position) -> sql.Composed:
        """source, primary: the batch that was claimed and not acked, as its row of ``claim`` with the ``error`` of its
        last attempt; null where there is none."""

    def note_failure(self, batch: Batch, error: str) -> sql.Composed:
        """source, primary: note what this attempt on the batch failed on."""

    def skip(self, row: Mapping[str, Any], reason: str) -> sql.Composed:
        """progress: go on behind a batch that ``in_work`` returned, which becomes a dead letter; its number."""


@runtime_checkable
class OfTables(Feed, Protocol):
    """What a feed can do besides whose changes are those of tables: it names them."""

    def tables(self) -> sql.Composed:
        """source, any server: ``[[schema, name], ...]`` of the tables whose changes come. A right more may be needed."""


def lags(asked: Sequence[tuple[Watched, Position, int]]) -> sql.Composed:
    """source, any server: an array of the ``lag`` of each of some feeds of a kind, in their order; one query for all."""
    kind = type(asked[0][0])
    if issubclass(kind, Shared):
        return kind.lags(asked)
    return together([feed.lag(position, upto) for feed, position, upto in asked])


def partitions(feed: Feed, batch: Batch, n: int, shard: int | None = None) -> list[Partition]:
    """At most ``n`` queries for the feed's columns, for any server of the source, that together return exactly the batch,
    in order; or what it has of one shard. Raises InvalidArgument for a shard of a feed that has none."""
    if shard is not None and not feed.sharded:
        raise InvalidArgument(f"{feed.name}: {feed.kind} feeds have no shards: leave out shard={shard}")
    slices = [part for part in batch.slices if shard is None or part.upto[0] == shard]
    columns = sql.SQL(", ").join(sql.Identifier(name) for name, _ in feed.columns)
    query = sql.SQL("select {} from {}")
    return [
        Partition(query.format(columns, feed.changes(batch, part)).as_string(None), part.count)
        for part in grouped(slices, n)
    ]


def shards(feed: Feed, batch: Batch) -> list[int]:
    """The shards that the batch has changes of, sorted; none of a feed without shards."""
    return sorted({part.upto[0] for part in batch.slices}) if feed.sharded else []


@runtime_checkable
class Movable(Feed, Protocol):
    """What a feed can do besides whose progress is kept with the results: its consumers can be moved."""

    @property
    def start(self) -> datetime | str | Mapping[str, Any]:
        """Where a new consumer starts: ``"beginning"``, ``"now"``, a time or a point."""

    def mark(self) -> sql.Composed:
        """source, primary: what it knows of the consumer's last claim; null where that is nothing."""

    def adopt_mark(self, mark: Mapping[str, Any] | None) -> sql.Composed:
        """results: go on from a ``mark``; the guarantee from here on, ``exactly once`` or ``at least once``."""

    def point_at(self, at: datetime | str | None) -> sql.Composed:
        """source, primary: the point behind all that is there now, or was before a time. Raises InvalidArgument for a
        time where the feed has none."""

    def note_move(self, position: Position, point: Any) -> sql.Composed:
        """source, primary: note a move from a position to a point that ``point_at`` returned, or with None to the
        beginning, as a claim notes a batch; the version for ``move_to``."""

    def move_to(self, point: Any, version: int) -> sql.Composed:
        """results: go on from the point of a move that ``note_move`` noted."""

    def note_start(self, position: Position, point: Any) -> sql.Composed:
        """source, primary: note the point at which a new consumer starts; the version for ``start_at``, or null if the
        consumer is not new."""

    def start_at(self, point: Any, version: int) -> sql.Composed:
        """results: put a new consumer at the point that ``note_start`` noted; false if it is not new."""

    def known(self) -> sql.Composed:
        """source, primary: whether it knows of the consumer, whose progress may be elsewhere."""

    def forget(self) -> sql.Composed:
        """results, and source if it is another and knows of it: forget the consumer, its claim and its dead letters."""


def progress_at(feed: Watched, results: T, source: T) -> T:
    """The one of the two databases, or whatever stands for them, that holds the consumer's lock and progress."""
    return results if feed.progress == "results" else source


CONDITIONS = ("min_changes", "max_age")
"""The fields of an asset's URI that say when the asset is updated. No feed has fields of these names."""
ENTRY_POINTS = "airflow_pgchange.feeds"
"""The group of entry points by which other packages name the classes of their feeds."""

_kinds: dict[str, type[Any]] = {}


def kind_of_feed(feed: Kind) -> Kind:
    """The decorator of a class of feeds: what status, the command line, assets and triggers find by its ``kind``.

    Raises InvalidArgument for names that begin with no prefix, or with that of another kind, and for a field of
    ``CONDITIONS``.
    """
    if taken := set(CONDITIONS) & set(getattr(feed, "__dataclass_fields__", ())):
        raise InvalidArgument(
            f"a {feed.kind} feed cannot have the field {', '.join(sorted(taken))}: the URI of its asset has a condition "
            "of that name; choose another name"
        )
    if hasattr(feed, "names"):
        _check_prefix(feed.kind, feed.names.prefix)
    _kinds[feed.kind] = feed
    return feed


def _check_prefix(kind: str, prefix: str) -> None:
    if prefix_of(prefix) != prefix or not prefix:
        raise InvalidArgument(
            f"consumers of kind {kind} cannot have names that begin with {prefix!r}: let them begin with a word and a "
            f"colon, such as {kind}:"
        )
    for other, feed in _kinds.items():
        if other != kind and hasattr(feed, "names") and feed.names.prefix == prefix:
            raise InvalidArgument(
                f"consumers of kind {kind} cannot have the prefix {prefix}: consumers of kind {other} have it; choose "
                f"another one, such as {kind}:"
            )


def kinds() -> Mapping[str, type[Any]]:
    """Every kind of feed by its name, those of other packages too."""
    from_other_packages()
    return _kinds


def is_prefix(prefix: str) -> bool:
    """Whether the names of consumers of some kind begin so."""
    return any(hasattr(kind, "names") and kind.names.prefix == prefix for kind in kinds().values())


@cache
def from_other_packages() -> None:
    """Register the feeds that entry points name, once."""
    for entry in entry_points(group=ENTRY_POINTS):
        kind_of_feed(entry.load())


def identity(feed: object) -> dict[str, Any]:
    """The fields that make the feed equal to another one, by name."""
    return {each.name: getattr(feed, each.name) for each in fields(feed) if each.compare}  # type: ignore[arg-type]


def to_json(feed: Watched) -> dict[str, Any]:
    """The feed as plain JSON, with the start of a new consumer if that is not the beginning."""
    start = getattr(feed, "start", None) or BEGINNING
    given = (
        {} if start == BEGINNING else {"start": start.isoformat() if isinstance(start, datetime) else start}
    )
    return {"kind": feed.kind, **identity(feed), **given}


def from_json(data: Mapping[str, Any]) -> Watched:
    """The feed that ``to_json`` wrote. Raises InvalidArgument for an unknown kind or field."""
    given = dict(data)
    kind = kinds().get(str(given.pop("kind", "")))
    if kind is None:
        raise InvalidArgument(
            f"unknown kind of feed in {dict(data)}: it must be one of {', '.join(sorted(kinds()))}"
        )
    try:
        feed: Watched = kind(**given)
    except TypeError as error:
        raise InvalidArgument(f"{data['kind']} feed: {error}") from error
    return feed


def to_uri(feed: Watched, server: str, conditions: Mapping[str, Any] | None = None) -> str:
    """The feed as an asset URI, ``pgchange://<server>/<kind>?...``; ``server`` is the name of a connection.

    ``conditions`` are those of ``CONDITIONS`` that are not the defaults: assets that differ in them are different assets.
    """
    given = {**identity(feed), **(conditions or {})}
    query = {key: json.dumps(value) for key, value in sorted(given.items())}
    return f"pgchange://{quote(server, safe='')}/{feed.kind}?{urlencode(query)}"


def from_uri(uri: str) -> tuple[Watched, str]:
    """The feed and the connection's name that ``to_uri`` wrote, without the conditions. Raises InvalidArgument for any
    other."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InvalidArgument(f"{uri!r} is not the URI of a feed: {error}") from error
    try:
        given = {key: json.loads(value) for key, value in parse_qsl(parts.query)}
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{uri!r}: its fields are not JSON: {error}") from error
    feed = {key: value for key, value in given.items() if key not in CONDITIONS}
    return from_json({"kind": parts.path.strip("/"), **feed}), unquote(parts.netloc)
