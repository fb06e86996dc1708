"""The queries of one round trip for many subscribers. One query answers many feeds of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from airflow_pgchange.feeds.feed import lags
from airflow_pgchange.triggers.subscription import Subscription
from airflow_pgchange.triggers.watches import Asked

AT_MOST = 50
"""The most feeds in one query. Such a query has the same timeout as the question about one feed."""
EACH_BY_ITSELF_FOR = 60.0
"""Seconds for which each feed of a kind is asked alone, after a query for many of them took too long."""

Question = Callable[[Subscription], sql.Composed]
Among = Callable[[Subscription], Asked | None]


@dataclass(frozen=True)
class Portion:
    """A query, and the subscriptions that it answers: one, or many ``of_kind``, whose answers are an array."""

    query: sql.Composed
    asked: Sequence[Subscription]
    of_kind: str | None = None

    def answers(self, value: Any) -> Iterator[tuple[Subscription, Any]]:
        return zip(self.asked, [value] if self.of_kind is None else value, strict=True)


@dataclass
class Sharing:
    """Remembers which kinds of feeds may share a query. The caller passes the time."""

    _not_before: dict[str, float] = field(default_factory=dict)

    def portions(
        self, asked: Sequence[Subscription], question: Question, among: Among, now: float
    ) -> list[Portion]:
        """Return queries that together answer all subscriptions. The queries for many come first."""
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
        """Stop sharing queries for a while. It is not known which query took too long, so this applies to all shared
        ones."""
        for portion in portions:
            if portion.of_kind is not None and len(portion.asked) > 1:
                self._not_before[portion.of_kind] = now + EACH_BY_ITSELF_FOR
