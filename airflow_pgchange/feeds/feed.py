"""The contract of a feed: a frozen value that builds queries and reads rows, and does no I/O.

``lag`` returns how far a consumer is behind, ``claim`` its next batch, ``partitions`` reads a batch, and ``ack`` records
it as processed. A query that a feed builds has no parameters, and returns one row with one JSON column.

The docstring of each query begins with the database that answers it: the results, or the source, which has the changes.
The database of the progress is either of them: it holds the consumer's lock and progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, runtime_checkable

from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds
from airflow_pgchange.feeds.batch import Batch, Change, Partition, Slice, grouped
from airflow_pgchange.feeds.consumer_names import Names
from airflow_pgchange.feeds.keys import BIGINT
from airflow_pgchange.feeds.queries import together

T = TypeVar("T")
Ask = Callable[[sql.Composed], Any]
Position = Mapping[str, Any]
Goal = Mapping[str, Any]
"""A point of a feed that a consumer is to reach."""
Token = Mapping[str, Any]
"""The ``id`` and the ``version`` of a batch, and the number of an ``attempt`` on it. It fences off earlier attempts."""
BEGINNING = "beginning"
"""The start of a consumer before all that the source has."""
NOWHERE: Position = {}
"""The position of a consumer that has not begun: it has processed no change."""


@runtime_checkable
class Watched(Protocol):
    """The contract of everything that triggers and sensors can wait for."""

    kind: ClassVar[str]
    progress: ClassVar[Literal["results", "source"]]
    """Where the consumer's lock and progress are kept."""
    covers: ClassVar[str | None]
    """The kind of feed, if it watches every consumer of that kind; None if it watches one consumer, or none."""

    @property
    def name(self) -> str:
        """The name of the consumer in messages, logs and metrics."""

    def position(self) -> sql.Composed:
        """At the database of the progress: the consumer's position, or null if it has not begun."""

    def lag(self, position: Position, upto: int) -> sql.Composed:
        """At any server of the source: the fields of ``Lag``. The cost grows with ``upto``, and not with the backlog or
        the history."""

    def locked(self) -> sql.Composed:
        """At the database of the progress: whether a transaction holds the consumer's lock, or the consumer's batch is
        leased. Does not take the lock. A lease is not known here if the changes are in another database."""


@runtime_checkable
class Shared(Protocol):
    """The contract of a kind of feed that can return the lag of many feeds in one query, which costs less than one for
    each."""

    @classmethod
    def lags(cls, asked: Sequence[tuple[Any, Position, int]]) -> sql.Composed:
        """At any server of the source: an array with the ``lag`` of each feed, in order. It fails if one of them
        fails."""


@runtime_checkable
class Feed(Watched, Protocol):
    """The contract of a feed that can be consumed."""

    schema_version: ClassVar[int]
    """The version of the SQL that the feed's queries call."""
    sharded: ClassVar[bool]
    """Whether each change belongs to a shard. The ends of a batch's slices then begin with the shard's number."""
    columns: ClassVar[tuple[tuple[str, str], ...]]
    """The names and PostgreSQL types of the columns that ``partitions`` selects. ``id`` is first."""
    names: ClassVar[Names]
    """The form of the names of its consumers in status."""

    @classmethod
    def named(cls, ask: Ask, *parts: str) -> Self:
        """Return the feed of the consumer with these parts of a name.

        ``ask`` queries the database of the changes, if the name does not contain all fields. For a feed that can be
        moved it contains all of them.
        """

    @classmethod
    def of_status(cls, feed: Mapping[str, Any]) -> Self:
        """Return the feed of a consumer, given the column ``feed`` of its row in ``pgchange.status()``."""

    def register(self) -> sql.Composed:
        """At the database of the progress: create this consumer's progress unless it exists. Needs a transaction of its
        own."""

    def lock(self) -> sql.Composed:
        """At the database of the progress: take the consumer's lock; false if another transaction holds it."""

    def choose(self, position: Position, limit: int) -> sql.Composed | None:
        """At a standby of the source: the next batch that can be read there. None for a feed that reads only the
        primary."""

    def claim(
        self,
        position: Position,
        limit: int,
        choice: Mapping[str, Any] | None,
        max_attempts: int | None,
        *,
        split: bool = False,
    ) -> sql.Composed:
        """At the source's primary: record and return the next batch, or the batch in work once more; null if nothing is
        ready.

        A batch that has failed ``max_attempts`` times is refused, which does not count as an attempt. With ``split``, a
        batch that has failed so often by its own content is split, and its first half is returned. The other parts come
        before other changes. PoisonousChange is raised for a single change. Attempts that an outage ended do not count.
        """

    def leased(self, claim: sql.Composed, owner: str, lease: Seconds) -> sql.Composed:
        """At the source's primary: ``claim``, which is a query of ``claim``, and a lease of its batch, for this time from
        now.

        Until the lease ends, a claim raises Leased. ``owner`` says for people who processes the batch.
        """

    def renew(self, token: Token, lease: Seconds) -> sql.Composed:
        """At the source's primary: let the lease end this much later than now. Raises StaleClaim if another attempt has
        begun, or the batch has ended."""

    def end_lease(self, token: Token) -> sql.Composed:
        """At the source's primary: end the lease; false if another attempt has begun, or the batch has ended."""

    def end_leases(self, owner: str | None = None) -> sql.Composed:
        """At the source's primary: end the leases of the consumer, or those of ``owner``, and return how many there
        were."""

    def resume(self, position: Position, token: Token) -> sql.Composed:
        """At the source's primary: the batch as the claim returned it, for a transaction that holds the lock. Raises
        StaleClaim if another attempt has begun, or the batch has ended."""

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        """At any server of the source: the function call that returns the changes of a slice of the batch, in order.
        ``partitions`` selects from it. Its ``id`` is text if ``batch.key`` is not bigint."""

    def change(self, row: Mapping[str, Any]) -> Change:
        """Return the change in a row of a partition."""

    def point(self) -> sql.Composed:
        """At the source's primary: the goal of a consumer that has processed everything that is committed now."""

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        """At the source's primary: ``{passed, goal}``. ``passed``: whether a consumer at ``position`` has reached the
        goal. ``goal``: the goal for the next query, which makes that query cheaper."""

    def outcome(self, token: Token) -> sql.Composed:
        """At the database of the progress, and at the source: the outcome of the attempt if this database knows it:
        ``acked``, ``skipped``, ``split``, ``failed`` or ``claimed``. Null if it does not. The database of the progress
        knows the first two, the source the others."""

    def ack(self, batch: Batch) -> sql.Composed:
        """At the database of the progress: record the batch as processed. Raises StaleClaim if the position has changed
        since the claim."""

    def in_work(self, position: Position) -> sql.Composed:
        """At the source's primary: the batch that was claimed and not acked, as the claim returned it, and the ``error``
        of its last attempt. Null if there is no such batch."""

    def note_failure(self, batch: Batch, error: str, of_batch: bool | None = None) -> sql.Composed:
        """At the source's primary: store the error of this attempt on the batch, and whether the batch itself may have
        caused it."""

    def skip(self, row: Mapping[str, Any], reason: str) -> sql.Composed:
        """At the database of the progress: make a batch that ``in_work`` returned a dead letter, move past it, and return
        the letter's number."""


@runtime_checkable
class OfTables(Feed, Protocol):
    """The contract of a feed whose changes are changes of tables: it can list the tables."""

    def tables(self) -> sql.Composed:
        """At any server of the source: ``[[schema, name], ...]`` of the tables. The role may need a further right."""


def lags(asked: Sequence[tuple[Watched, Position, int]]) -> sql.Composed:
    """At any server of the source: an array with the ``lag`` of each of these feeds of one kind, in order, by one
    query."""
    kind = type(asked[0][0])
    if issubclass(kind, Shared):
        return kind.lags(asked)
    return together([feed.lag(position, upto) for feed, position, upto in asked])


def columns_of(feed: Feed, batch: Batch) -> tuple[tuple[str, str], ...]:
    """Return the names and PostgreSQL types of the columns that ``partitions`` selects for this batch.

    They are those of the feed. For keys that are not bigint, ``id`` is text, or an array of text if the key has several
    columns.
    """
    if batch.key == BIGINT:
        return feed.columns
    kind = "text" if len(batch.key) == 1 else "text[]"
    return tuple((name, kind if name == "id" else other) for name, other in feed.columns)


def _read(name: str, kind: str) -> sql.Composable:
    """The column of ``changes`` as ``partitions`` selects it: there the key of several columns is one text."""
    if kind == "text[]":
        return sql.SQL("{0}::text[] as {0}").format(sql.Identifier(name))
    return sql.Identifier(name)


def partitions(feed: Feed, batch: Batch, n: int, shard: int | None = None) -> list[Partition]:
    """Return at most ``n`` queries that together return exactly the batch, or one shard of it, in order.

    They select the feed's columns, on any server of the source. Raises InvalidArgument if the feed has no shards.
    """
    if shard is not None and not feed.sharded:
        raise InvalidArgument(f"{feed.name}: {feed.kind} feeds have no shards: leave out shard={shard}")
    slices = [part for part in batch.slices if shard is None or part.upto[0] == shard]
    columns = sql.SQL(", ").join(_read(name, kind) for name, kind in columns_of(feed, batch))
    query = sql.SQL("select {} from {}")
    return [
        Partition(query.format(columns, feed.changes(batch, part)).as_string(None), part.count)
        for part in grouped(slices, n)
    ]


def shards(feed: Feed, batch: Batch) -> list[int]:
    """Return the shards of the batch's changes, sorted. Empty for a feed without shards."""
    return sorted({part.upto[0] for part in batch.slices}) if feed.sharded else []


@runtime_checkable
class Movable(Feed, Protocol):
    """The contract of a feed whose progress is kept with the results: its consumers can be moved."""

    @property
    def start(self) -> datetime | str | Mapping[str, Any]:
        """Where a new consumer starts: ``"beginning"``, ``"now"``, a time or a point."""

    def mark(self) -> sql.Composed:
        """At the source's primary: the mark of the consumer's last claim; null if there is none."""

    def adopt_mark(self, mark: Mapping[str, Any] | None) -> sql.Composed:
        """At the results: continue from a ``mark``. Returns the guarantee from then on: ``exactly once`` or ``at least
        once``."""

    def point_at(self, at: datetime | str | None) -> sql.Composed:
        """At the source's primary: the point after all changes that exist now, or that existed before a time. Raises
        InvalidArgument for a time if the feed has no times."""

    def note_move(self, position: Position, point: Any) -> sql.Composed:
        """At the source's primary: record a move, as a claim records a batch, and return the version for ``move_to``.

        ``point`` is the result of ``point_at``, or None for the beginning.
        """

    def move_to(self, point: Any, version: int) -> sql.Composed:
        """At the results: continue from the point of a move that ``note_move`` has recorded."""

    def consumer_names(self) -> sql.Composed:
        """At the source: a row for each consumer of this kind that has claimed or was moved, with its name."""

    def note_start(self, position: Position, point: Any) -> sql.Composed:
        """At the source's primary: note the point at which a new consumer starts; the version for ``start_at``, or null
        if the consumer is not new."""

    def start_at(self, point: Any, version: int) -> sql.Composed:
        """At the results: put a new consumer at the point that ``note_start`` noted; false if it is not new."""

    def known(self) -> sql.Composed:
        """At the source's primary: whether this database has a record of the consumer, whose progress may be in another
        database."""

    def forget(self) -> sql.Composed:
        """At the results, and at a different source that has a record of the consumer: delete the consumer, its
        claim and its dead letters."""


def progress_at(feed: Watched, results: T, source: T) -> T:
    """Return ``results`` or ``source``, whichever holds the consumer's lock and progress."""
    return results if feed.progress == "results" else source
