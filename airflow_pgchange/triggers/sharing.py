"""What many subscribers are asked with in one round trip: of feeds of a kind many in one query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from airflow_pgchange.feeds.feed import lags
from airflow_pgchange.triggers.subscription import Subscription
from airflow_pgchange.triggers.watches import Asked

AT_MOST = 50
"""Feeds that one query asks about: it may take no longer than the question of one."""
EACH_BY_ITSELF_FOR = 60.0
"""Seconds for which a kind is not shared after a query of many took too long."""

Question = Callable[[Subscription], sql.Composed]
Among = Callable[[Subscription], Asked | None]


@dataclass(frozen=True)
class Portion:
    """A query, and whom it answers: one, or with an array many ``of_kind``."""

    query: sql.Composed
    asked: Sequence[Subscription]
    of_kind: str | None = None

    def answers(self, value: Any) -> Iterator[tuple[Subscription, Any]]:
        return zip(self.asked, [value] if self.of_kind is None else value, strict=True)


@dataclass
class Sharing:
    """Which kinds are shared; the time is the caller's."""

    _not_before: dict[str, float] = field(default_factory=dict)

    def portions(
        self, asked: Sequence[Subscription], question: Question, among: Among, now: float
    ) -> list[Portion]:
        """Queries that together answer all, those for many first."""
        alone: list[Portion] = []
        kinds: dict[str, list[tuple[Subscription, Asked]]] = {}
        for subscription in asked:
            kind, shared = subscription.watch.feed.kind, among(subscription)
            if shared is None or now < self._not_before.get(kind, now):
                alone.append(Portion(question(subscription), [subscription]))
            else:
                kinds.setdefault(kind, []).append((subscription, shared))
        return [
            Portion(lags([each for _, each in some]), [subscription for subscription, _ in some], kind)
            for kind, of_kind in kinds.items()
            for some in (of_kind[n : n + AT_MOST] for n in range(0, len(of_kind), AT_MOST))
        ] + alone

    def took_too_long(self, portions: Sequence[Portion], now: float) -> None:
        """One of these did, and nobody knows which: its many have the time of one each for a while."""
        for portion in portions:
            if portion.of_kind is not None and len(portion.asked) > 1:
                self._not_before[portion.of_kind] = now + EACH_BY_ITSELF_FOR
