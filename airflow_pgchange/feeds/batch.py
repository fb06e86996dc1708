"""Batches, changes and lag: plain values, which are passed as JSON between operator, Spark driver and executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from airflow_pgchange.feeds.keys import BIGINT, Key


@dataclass(frozen=True)
class Change:
    """One change of a feed: a changed row, a touched id, an event or a message.

    ``id`` is the key of the changed row, or the id of the event or message. It is an int for a key of one integer
    column, a str for another column, a tuple for several. ``position`` is its place in the order of the feed.
    ``created_at`` is the time at which it was written, touched, published or posted. ``data`` has the other columns of
    the feed.
    """

    id: Key
    position: str
    created_at: datetime
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lag:
    """How far a consumer is behind.

    ``ready`` counts the changes that can be claimed now, ``waiting`` those that cannot be claimed yet. Both are exact up
    to the number ``upto`` of the query. Above it they are estimates, and the ``_exact`` flag is false. Ages are in
    seconds, None if there are no such changes. ``faults`` counts changes that the capture could not assign to a branch or
    a tube, and that wait for a replay.
    """

    ready: int
    waiting: int
    ready_exact: bool = True
    waiting_exact: bool = True
    ready_age: float | None = None
    waiting_age: float | None = None
    faults: int = 0


@dataclass(frozen=True)
class Slice:
    """Consecutive changes of a batch: the ``count`` changes after the position ``after``, up to and including
    ``upto``."""

    count: int
    after: Any
    upto: Any


@dataclass(frozen=True)
class Partition:
    """A query without parameters that returns exactly ``count`` rows of the batch."""

    query: str
    count: int


def whole_of(batch: Mapping[str, Any]) -> str | None:
    """Return the id of the batch that was split, given one of its parts as JSON; None if the given batch is no part."""
    bounds = batch.get("bounds", {})
    return bounds["split"]["parts_of"][0] if "split" in bounds and "letter" not in bounds else None


@dataclass(frozen=True)
class Batch:
    """An ordered set of changes. Every attempt gets the same changes under the same id.

    ``id`` is the idempotency key for results outside PostgreSQL. ``feed`` is the name of the consumer, as in status.
    ``version`` distinguishes the batch from the consumer's earlier batches. ``attempt`` counts from 1. ``lsn`` is a
    position in the write-ahead log. A reader on a standby waits until it is replayed, because then every change of the
    batch is there. ``oldest`` is the time at which the first of its changes was written, as ISO 8601.
    ``first_claimed_at`` is the time of the first attempt, by the clock of the source. A part of a split batch has the
    time of the whole batch. ``bounds`` is internal to the feed. ``seconds`` is the duration of each phase of this
    attempt, for people.

    ``atomic`` tells whether the progress is in the database of the results, so that one commit keeps both.
    """

    id: str
    feed: str
    version: int
    attempt: int
    count: int
    slices: tuple[Slice, ...]
    bounds: Mapping[str, Any]
    lsn: str | None = None
    oldest: str | None = None
    first_claimed_at: str | None = None
    atomic: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """The types of the columns of its rows' key, such as ``("bigint",)`` or ``("uuid", "bigint")``. All integers
        are bigint here. If the ids of a feed are not keys of rows, it is ``("bigint",)``."""
        return tuple(self.bounds.get("key", BIGINT))

    @property
    def token(self) -> dict[str, Any]:
        """The part of the batch that names this attempt, for ``ConsumerTransaction.resume``."""
        return {"id": self.id, "version": self.version, "attempt": self.attempt}

    @property
    def parts_of(self) -> tuple[str, ...]:
        """The ids of the batches of which this batch is a part, the whole batch first; empty for a whole batch.

        A batch that failed by its own content is split into parts. A sink outside PostgreSQL that has recorded one of
        these ids as done has all changes of this batch, so it skips the batch.
        """
        return tuple(self._split.get("parts_of", ()))

    @property
    def is_part(self) -> bool:
        """Whether this is a part of a batch that is being split. The batch of a dead letter is not."""
        return bool(self.parts_of) and "letter" not in self.bounds

    @property
    def is_last_part(self) -> bool:
        """Whether no other part of the same whole batch follows; also true for a whole batch."""
        return "letter" in self.bounds or not self._split.get("rest")

    @property
    def _split(self) -> Mapping[str, Any]:
        split: Mapping[str, Any] = self.bounds.get("split", {})
        return split

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "slices": [asdict(part) for part in self.slices], "bounds": dict(self.bounds)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Batch:
        return cls(**{**data, "slices": tuple(Slice(**part) for part in data["slices"])})


def grouped(slices: Sequence[Slice], n: int) -> list[Slice]:
    """Join consecutive slices, so that at most ``n`` slices of about equal counts remain, in the same order."""
    share = -(-sum(part.count for part in slices) // max(n, 1))
    groups: list[Slice] = []
    for part in slices:
        if groups and groups[-1].count < share and len(groups) <= n:
            groups[-1] = Slice(groups[-1].count + part.count, groups[-1].after, part.upto)
        else:
            groups.append(part)
    return groups
