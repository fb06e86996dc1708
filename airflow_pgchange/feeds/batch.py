"""What a claim hands out: plain values that travel as JSON between operator, Spark driver and executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Change:
    """One thing that a feed hands out.

    ``id`` is the key of the row that the change names, or an event's own id; ``position`` orders it within its feed;
    ``created_at`` is when it was written, touched, published or posted; ``data`` is what its feed says of it.
    """

    id: int | str
    position: str
    created_at: datetime
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lag:
    """How far a consumer is behind.

    ``ready`` is what a claim would return now, ``waiting`` what is there but cannot be claimed yet. Both are exact up to
    the number asked about, beyond it an estimate (then the ``_exact`` flag is false). Ages are in seconds, None where
    there is nothing. ``faults`` counts changes that capture could not place and that wait for a replay.
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
    """A run of consecutive changes of a batch: ``count`` changes above ``after`` up to and including ``upto``."""

    count: int
    after: Any
    upto: Any


@dataclass(frozen=True)
class Partition:
    """A query, complete and without parameters, that returns exactly ``count`` rows of the batch."""

    query: str
    count: int


@dataclass(frozen=True)
class Batch:
    """An ordered set of changes that is the same, under the same id, however often it is tried.

    ``id`` is the idempotency key for results outside PostgreSQL. ``feed`` names its consumer, as status does, and
    ``version`` tells it from those that the consumer had before. ``attempt`` counts from 1. ``lsn`` is the point of the
    write-ahead log at which every change of the batch can be read, so that a reader on a standby waits for it. ``oldest``
    is when the first of its changes was written, as ISO 8601.
    ``bounds`` belongs to the feed. ``seconds`` is how long each phase of this attempt took, for people.
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
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "slices": [asdict(part) for part in self.slices], "bounds": dict(self.bounds)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Batch:
        return cls(**{**data, "slices": tuple(Slice(**part) for part in data["slices"])})


def grouped(slices: Sequence[Slice], n: int) -> list[Slice]:
    """At most ``n`` slices of about equal counts that together are ``slices``, in the same order."""
    share = -(-sum(part.count for part in slices) // max(n, 1))
    groups: list[Slice] = []
    for part in slices:
        if groups and groups[-1].count < share and len(groups) <= n:
            groups[-1] = Slice(groups[-1].count + part.count, groups[-1].after, part.upto)
        else:
            groups.append(part)
    return groups
