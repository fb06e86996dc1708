"""Record in the database what watchers of feeds observe. ``pgchange.watchers()`` shows it to people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import PermissionDenied, SchemaMissing
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.feeds.queries import ask_all, select
from airflow_pgchange.triggers.watches import LagLimits, Watch

NOTED_EVERY = 5.0
"""Seconds after which an observation is recorded again. It is recorded at once if a subscriber was woken, if the feed
cannot be watched any more, or if it can be watched again."""


@dataclass(frozen=True)
class Seen:
    """The result of one query: the number of ready changes, or the error."""

    ready: int | None = None
    error: str | None = None


@dataclass
class Sight:
    """The last observation of one watcher (``seen``), and the last that was recorded (``noted``), with its time.

    ``woke_at`` is the time at which the watcher woke its subscriber, or None if that is recorded already.
    """

    seen: Seen | None = None
    woke_at: float | None = None
    noted: Seen | None = None
    noted_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether the observation must be recorded now."""
        if self.seen is None:
            return False
        as_before = self.noted is not None and (self.noted.error is None) == (self.seen.error is None)
        woken_since = self.woke_at is not None and self.woke_at > self.noted_at
        return not as_before or woken_since or now >= self.noted_at + NOTED_EVERY


def limits_of(watches: Iterable[Watch]) -> dict[Watched, LagLimits]:
    """Return the strictest limits that the watches of each feed give."""
    found: dict[Watched, LagLimits] = {}
    for watch in watches:
        if watch.limits is not None:
            found[watch.feed] = watch.limits.and_of(found.get(watch.feed, watch.limits))
    return found


async def note(
    connection: psycopg.AsyncConnection[Any],
    sights: Mapping[Watched, Sight],
    now: float,
    limits: Mapping[Watched, LagLimits] = MappingProxyType({}),
) -> bool:
    """Record the observations of feeds, and the limits of their lag. The limits of a feed that ``limits`` lacks stay the
    same. Return False if this role may not, or if the database lacks the function."""
    told = []
    for feed, sight in sights.items():
        sight.noted, sight.noted_at = sight.seen, now
        if sight.seen is not None:
            woke = None if sight.woke_at is None else now - sight.woke_at
            given = asdict(limits[feed]) if feed in limits else None
            told.append(
                {"feed": feed.name, "kind": feed.kind, "woke": woke, "limits": given, **asdict(sight.seen)}
            )
    try:
        await ask_all(connection, [select("pgchange.note_watchers", Jsonb(told))])
    except (PermissionDenied, SchemaMissing):
        return False
    for sight in sights.values():
        sight.woke_at = None
    return True
