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
from airflow_pgchange.triggers.watch_queries import LagLimits, Watch

RECORD_EVERY = 5.0
"""Seconds after which an observation is recorded again. An observation is recorded at once in three cases: it woke
a subscriber, queries began to fail, or queries succeed again."""


@dataclass(frozen=True)
class Observation:
    """The result of one query: the number of ready changes, or the error."""

    ready: int | None = None
    error: str | None = None


@dataclass
class Observations:
    """The latest observation of one watcher, and the observation that was recorded last, with its time.

    ``woke_at`` is the time at which the watcher woke its subscriber, or None if that is recorded already.
    """

    latest: Observation | None = None
    woke_at: float | None = None
    recorded: Observation | None = None
    recorded_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether to record the latest observation now."""
        if self.latest is None:
            return False
        same_state = self.recorded is not None and (self.recorded.error is None) == (
            self.latest.error is None
        )
        woken_since = self.woke_at is not None and self.woke_at > self.recorded_at
        return not same_state or woken_since or now >= self.recorded_at + RECORD_EVERY


def limits_of(watches: Iterable[Watch]) -> dict[Watched, LagLimits]:
    """Return the strictest limits that the watches of each feed set."""
    limits: dict[Watched, LagLimits] = {}
    for watch in watches:
        if watch.limits is not None:
            limits[watch.feed] = watch.limits.and_of(limits.get(watch.feed, watch.limits))
    return limits


async def record(
    connection: psycopg.AsyncConnection[Any],
    watchers: Mapping[Watched, Observations],
    now: float,
    limits: Mapping[Watched, LagLimits] = MappingProxyType({}),
) -> bool:
    """Record the observations of feeds, and the limits of their lag. Return False if this role lacks the right, or if the
    database lacks the function.

    The limits of a feed that is not in ``limits`` stay as they are.
    """
    observations = []
    for feed, watcher in watchers.items():
        watcher.recorded, watcher.recorded_at = watcher.latest, now
        if watcher.latest is not None:
            woke = None if watcher.woke_at is None else now - watcher.woke_at
            set_limits = asdict(limits[feed]) if feed in limits else None
            observations.append(
                {
                    "feed": feed.name,
                    "kind": feed.kind,
                    "woke": woke,
                    "limits": set_limits,
                    **asdict(watcher.latest),
                }
            )
    try:
        await ask_all(connection, [select("pgchange.note_watchers", Jsonb(observations))])
    except (PermissionDenied, SchemaMissing):
        return False
    for watcher in watchers.values():
        watcher.woke_at = None
    return True
