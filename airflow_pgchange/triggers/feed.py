"""The triggers of feeds, for asset watchers and for deferred sensors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

from airflow_pgchange.errors import (
    AirflowUnavailable,
    ConsumerBusy,
    InvalidArgument,
    Permanent,
    ServerUnavailable,
)
from airflow_pgchange.feeds.argument_checks import MOMENT, Seconds, patience, seconds
from airflow_pgchange.feeds.feed import Feed, Goal, Watched, progress_at
from airflow_pgchange.feeds.feed_kinds import CONDITIONS, identity
from airflow_pgchange.feeds.message_queue import QueueFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.triggers.poller import switchboard
from airflow_pgchange.triggers.subscription import Failure, News, Recovered, Subscription
from airflow_pgchange.triggers.watch_queries import (
    BacklogWatch,
    IdleWatch,
    LagLimits,
    Payload,
    PointWatch,
    ReplyWatch,
)
from airflow_pgchange.utils.arguments import FeedLike, Number, count, feed_of, watched_of

POLL_INTERVAL = 0.1
"""Seconds between two queries."""
IDLE_POLL_INTERVAL = 0.5
"""Seconds between two queries for the end of a lease, which may last for hours."""
DEFAULTS = {"min_changes": 1, "max_age": None}
"""The default conditions of ``FeedTrigger``."""


class FeedTrigger(BaseEventTrigger):
    """Fires when ``min_changes`` changes of a feed are ready, or when a ready change is ``max_age`` old.

    An event wakes a consumer; it contains no batch. Its payload is the lag, as JSON. The trigger fires once for a
    backlog, and again after growing pauses while changes are ready and no consumer is at work. The conditions are
    alternatives, so ``max_age`` needs no ``min_changes``.

    ``max_lag`` and ``max_backlog`` say how far behind the consumer may be before ``pgchange.health()`` reports it. They
    are the age of its oldest ready change (default: an hour), and the number of its changes (default: any). The trigger
    records them in the database with its observations, and needs no further right for that. They have no effect with
    ``once``. A limit that was set by ``pgchange.limit_lag()`` takes precedence.

    Without ``once`` the trigger runs until it is cancelled. With ``once`` it ends after the first event. An error then
    ends it too, and the payload has the message as ``error``. Errors that may be temporary are retried: PostgreSQL cannot
    be reached, Airflow is slow to return the connection, or a table is locked.
    """

    def __init__(
        self,
        feed: FeedLike,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        *,
        min_changes: Number = 1,
        max_age: Seconds | None = None,
        poll_interval: Seconds = POLL_INTERVAL,
        max_lag: Seconds | None = None,
        max_backlog: Number | None = None,
        once: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.feed = watched_of(feed)
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.min_changes = count("min_changes", min_changes)
        self.max_age = patience("max_age", max_age)
        self.poll_interval = seconds("poll_interval", poll_interval)
        self.max_lag = None if max_lag is None else seconds("max_lag", max_lag, least=MOMENT)
        self.max_backlog = None if max_backlog is None else count("max_backlog", max_backlog)
        self.once = once
        if self._limits != LagLimits() and not isinstance(self.feed, Feed):
            raise InvalidArgument(
                f"{self.feed.name}: max_lag and max_backlog limit one consumer, and this feed has several: leave them "
                "out, and set the limit of each consumer with pgchange.limit_lag()"
            )

    @property
    def _limits(self) -> LagLimits:
        return LagLimits(self.max_lag, self.max_backlog)

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions on which the trigger fires, if they differ from their defaults."""
        conditions = {name: getattr(self, name) for name in CONDITIONS}
        return {name: value for name, value in conditions.items() if value != DEFAULTS[name]}

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.FeedTrigger", {
            "feed": _identified(self.feed),
            "postgres_conn_id": self.postgres_conn_id,
            "source_conn_id": self.source_conn_id,
            "min_changes": self.min_changes,
            "max_age": self.max_age,
            "poll_interval": self.poll_interval,
            "max_lag": self.max_lag,
            "max_backlog": self.max_backlog,
            "once": self.once,
        }

    def run(self) -> AsyncIterator[TriggerEvent]:
        # The asset's watcher sets the limits. With once, a sensor waits, which must not overwrite them.
        watch = BacklogWatch(self.feed, self.min_changes, self.max_age, None if self.once else self._limits)
        source = self.source_conn_id or self.postgres_conn_id
        progress = progress_at(self.feed, self.postgres_conn_id, source)
        subscribed = switchboard().subscribe(watch, progress, source, self.poll_interval)
        return _events(self, self.feed.name, subscribed, once=self.once)


class PointTrigger(BaseTrigger):
    """Fires once, when a consumer has processed everything up to a point.

    The point is the argument ``goal``. Airflow stores the arguments of a trigger, so the goal survives a restart of the
    triggerer.
    """

    def __init__(
        self,
        feed: FeedLike,
        postgres_conn_id: str,
        source_conn_id: str | None,
        goal: Goal,
        *,
        poll_interval: Seconds = POLL_INTERVAL,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.feed = feed_of(feed)
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.goal = goal
        self.poll_interval = seconds("poll_interval", poll_interval)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.PointTrigger", {
            "feed": _identified(self.feed),
            "postgres_conn_id": self.postgres_conn_id,
            "source_conn_id": self.source_conn_id,
            "goal": self.goal,
            "poll_interval": self.poll_interval,
        }

    def run(self) -> AsyncIterator[TriggerEvent]:
        watch = PointWatch(self.feed, self.goal)
        source = self.source_conn_id or self.postgres_conn_id
        progress = progress_at(self.feed, self.postgres_conn_id, source)
        subscribed = switchboard().subscribe(watch, progress, source, self.poll_interval, primary=True)
        return _events(self, self.feed.name, subscribed, once=True)


class IdleTrigger(BaseTrigger):
    """Fires once, when a consumer is idle: no transaction holds its lock, and no lease is running."""

    def __init__(
        self,
        feed: FeedLike,
        postgres_conn_id: str,
        source_conn_id: str | None,
        *,
        poll_interval: Seconds = IDLE_POLL_INTERVAL,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.feed = feed_of(feed)
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.poll_interval = seconds("poll_interval", poll_interval)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.IdleTrigger", {
            "feed": _identified(self.feed),
            "postgres_conn_id": self.postgres_conn_id,
            "source_conn_id": self.source_conn_id,
            "poll_interval": self.poll_interval,
        }

    def run(self) -> AsyncIterator[TriggerEvent]:
        source = self.source_conn_id or self.postgres_conn_id
        progress = progress_at(self.feed, self.postgres_conn_id, source)
        subscribed = switchboard().subscribe(
            IdleWatch(self.feed), progress, source, self.poll_interval, primary=True
        )
        return _events(self, self.feed.name, subscribed, once=True)


class ReplyTrigger(BaseTrigger):
    """Fires once, when a message with a given iid is in a queue."""

    def __init__(
        self, queue_name: str, iid: str, postgres_conn_id: str, *, poll_interval: Seconds = POLL_INTERVAL
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.queue_name = queue_name
        self.iid = iid
        self.postgres_conn_id = postgres_conn_id
        self.poll_interval = seconds("poll_interval", poll_interval)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.ReplyTrigger", {
            "queue_name": self.queue_name,
            "iid": self.iid,
            "postgres_conn_id": self.postgres_conn_id,
            "poll_interval": self.poll_interval,
        }

    def run(self) -> AsyncIterator[TriggerEvent]:
        watch, database = ReplyWatch(QueueFeed(self.queue_name), self.iid), self.postgres_conn_id
        subscribed = switchboard().subscribe(watch, database, database, self.poll_interval)
        return _events(self, self.queue_name, subscribed, once=True)


def _identified(feed: Watched) -> str:
    """Return the feed as text. Airflow 3.2 stores a dict among the arguments of a watcher in a form that it cannot read
    back, and then its triggerer ends."""
    return json.dumps({"kind": feed.kind, **identity(feed)}, sort_keys=True)


async def _events(
    trigger: BaseTrigger, name: str, subscribed: AbstractAsyncContextManager[Subscription], *, once: bool
) -> AsyncIterator[TriggerEvent]:
    """Yield the events of a subscription; with ``once`` only the first."""
    async with subscribed as subscription:
        async for news in subscription:
            event = _event(trigger, name, news, once)
            if event is not None:
                yield event
                if once:
                    return


def _event(trigger: BaseTrigger, name: str, news: News, once: bool) -> TriggerEvent | None:
    """Return the event for news of a subscription, or None if the news is only logged.

    Failures and recoveries are logged. With ``once``, an error that no retry can fix is an event.
    """
    if isinstance(news, Recovered):
        trigger.log.info("%s: the query succeeds again", name)
    elif isinstance(news, Failure):
        if once and not isinstance(news.error, AirflowUnavailable | ServerUnavailable | ConsumerBusy):
            permanent = isinstance(news.error, Permanent)
            return _fired({"feed": name, "error": str(news.error), "permanent": permanent})
        trigger.log.warning("%s: the query failed, will retry in %g s: %s", name, news.retry_in, news.error)
    else:
        return _fired(news)
    return None


def _fired(payload: Payload) -> TriggerEvent:
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]
