"""What watchers of feeds see, noted in the database for people: ``pgchange.watchers()`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import PermissionDenied, SchemaMissing
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.feeds.queries import ask_all, select

NOTED_EVERY = 5.0
"""Seconds after which it is noted again; that somebody was woken, or that a feed cannot be watched, or can again, is
noted at once."""


@dataclass(frozen=True)
class Seen:
    """What a look came to: how much was ready, or why nobody can look."""

    ready: int | None = None
    error: str | None = None


@dataclass
class Sight:
    """What one watcher saw last, and what of that was noted, and when; and when it told its subscriber of something,
    where that is not noted yet."""

    seen: Seen | None = None
    woke_at: float | None = None
    noted: Seen | None = None
    noted_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether it is to be noted now."""
        if self.seen is None:
            return False
        as_before = self.noted is not None and (self.noted.error is None) == (self.seen.error is None)
        woken_since = self.woke_at is not None and self.woke_at > self.noted_at
        return not as_before or woken_since or now >= self.noted_at + NOTED_EVERY


async def note(connection: psycopg.AsyncConnection[Any], sights: Mapping[Watched, Sight], now: float) -> bool:
    """Note what is seen of feeds; False where this role may not, or the database has no place for it."""
    told = []
    for feed, sight in sights.items():
        sight.noted, sight.noted_at = sight.seen, now
        if sight.seen is not None:
            woke = None if sight.woke_at is None else now - sight.woke_at
            told.append({"feed": feed.name, "kind": feed.kind, "woke": woke, **asdict(sight.seen)})
    try:
        await ask_all(connection, [select("pgchange.note_watchers", Jsonb(told))])
    except (PermissionDenied, SchemaMissing):
        return False
    for sight in sights.values():
        sight.woke_at = None
    return True
