"""The queries of one round trip for many subscribers. One query answers many feeds of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from airflow_pgchange.feeds.feed import lags
from airflow_pgchange.triggers.subscription import Subscription
from airflow_pgchange.triggers.watch_queries import LagArguments

AT_MOST = 50
"""Maximum number of feeds in one query. Such a query has the same timeout as a query about one feed."""
EACH_BY_ITSELF_FOR = 60.0
"""Seconds for which each feed of a kind has its own query, after a query for many of them took too long."""

Question = Callable[[Subscription], sql.Composed]
Among = Callable[[Subscription], LagArguments | None]


@dataclass(frozen=True)
class Portion:
    """A query, and the subscriptions that it answers. With ``of_kind``, it returns an array with an answer for each."""

    query: sql.Composed
    subscriptions: Sequence[Subscription]
    of_kind: str | None = None

    def answers(self, value: Any) -> Iterator[tuple[Subscription, Any]]:
        return zip(self.subscriptions, [value] if self.of_kind is None else value, strict=True)


@dataclass
class Sharing:
    """Decides which feeds share a query: those of the same kind, unless such a query took too long.

    The caller passes the time.
    """

    _not_before: dict[str, float] = field(default_factory=dict)

    def portions(
        self, subscriptions: Sequence[Subscription], question: Question, among: Among, now: float
    ) -> list[Portion]:
        """Return queries that together answer all subscriptions. The shared queries come first.

        ``question`` returns the query of one subscription, ``among`` its arguments in a shared query, or None if it
        cannot share.
        """
        alone: list[Portion] = []
        kinds: dict[str, list[tuple[Subscription, LagArguments]]] = {}
        for subscription in subscriptions:
            kind, arguments = subscription.watch.feed.kind, among(subscription)
            if arguments is None or now < self._not_before.get(kind, now):
                alone.append(Portion(question(subscription), [subscription]))
            else:
                kinds.setdefault(kind, []).append((subscription, arguments))
        return [
            Portion(lags([arguments for _, arguments in chunk]), [each for each, _ in chunk], kind)
            for kind, of_kind in kinds.items()
            for chunk in (of_kind[n : n + AT_MOST] for n in range(0, len(of_kind), AT_MOST))
        ] + alone

    def took_too_long(self, portions: Sequence[Portion], now: float) -> None:
        """Stop sharing queries for a while. PostgreSQL does not say which query took too long, so this applies to every
        kind with a shared query."""
        for portion in portions:
            if portion.of_kind is not None and len(portion.subscriptions) > 1:
                self._not_before[portion.of_kind] = now + EACH_BY_ITSELF_FOR
