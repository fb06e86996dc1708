"""The queries that a poller sends for its subscribers: for a consumer's lag, its progress, or a message."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from psycopg import sql

from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.feed import NOWHERE, Feed, Goal, Position, Watched
from airflow_pgchange.feeds.message_queue import QueueFeed
from airflow_pgchange.feeds.queries import select
from airflow_pgchange.triggers.backlog_alarm import Alarm
from airflow_pgchange.utils import metrics

N = TypeVar("N", int, float)
Payload = dict[str, Any]
LagArguments = tuple[Watched, Position, int]
"""The arguments of a query for lag: the feed, the consumer's position, and the number up to which to count."""


@dataclass(frozen=True)
class LagLimits:
    """The lag from which on ``pgchange.health()`` reports a consumer, as set in its DAG; None if the DAG sets none.

    ``max_lag`` is the age of its oldest ready change in seconds, ``max_backlog`` the number of its changes.
    """

    max_lag: float | None = None
    max_backlog: int | None = None

    def and_of(self, other: LagLimits) -> LagLimits:
        """Return the stricter limits."""
        return LagLimits(_least(self.max_lag, other.max_lag), _least(self.max_backlog, other.max_backlog))


def _least(first: N | None, second: N | None) -> N | None:
    return min((limit for limit in (first, second) if limit is not None), default=None)


class Watch(Protocol):
    """A query about one feed that is repeated. ``lasting``: it continues after its first news."""

    lasting: ClassVar[bool]

    @property
    def feed(self) -> Watched: ...

    @property
    def limits(self) -> LagLimits | None:
        """The limits of the consumer's lag that this subscriber sets; None if it sets none. For ``lasting`` watches."""

    def question(self, position: Position | None) -> sql.Composed:
        """Return the query for the source, given the consumer's position."""

    def shared(self, position: Position | None) -> LagArguments | None:
        """Return the arguments for a query about many feeds of the kind (``lags``); None if the watch cannot share its
        query."""

    def news(self, position: Position | None, answer: Any, now: float) -> Payload | None:
        """Return the news for the subscriber, as JSON; None if there is none."""

    def failed(self) -> None:
        """Record that the query failed."""

    def given_up(self) -> None:
        """Record that the subscriber has left."""

    def unless_at_work(self, held: bool, now: float) -> bool:
        """Whether to send the news, given whether a consumer holds the lock."""


@dataclass
class BacklogWatch:
    """Waits for a backlog that no consumer is working on."""

    lasting: ClassVar[bool] = True

    feed: Watched
    min_changes: int = 1
    max_age: float | None = None
    limits: LagLimits | None = None
    _alarm: Alarm = field(init=False)
    _meter: metrics.Meter = field(init=False)

    def __post_init__(self) -> None:
        self._alarm = Alarm(self.min_changes, self.max_age)
        self._meter = metrics.Meter(self.feed.name)

    def question(self, position: Position | None) -> sql.Composed:
        return self.feed.lag(NOWHERE if position is None else position, self.min_changes)

    def shared(self, position: Position | None) -> LagArguments | None:
        return self.feed, NOWHERE if position is None else position, self.min_changes

    def news(self, position: Position | None, answer: Any, now: float) -> Payload | None:
        lag = Lag(**answer)
        self._meter.lag(lag, now)
        return {"feed": self.feed.name, **asdict(lag)} if self._alarm.due(position, lag, now) else None

    def failed(self) -> None:
        self._meter.blind()

    def given_up(self) -> None:
        self._meter.given_up()

    def unless_at_work(self, held: bool, now: float) -> bool:
        if held:
            self._alarm.at_work(now)
            return False
        return self._alarm.idle(now)


@dataclass
class PointWatch:
    """Waits until a consumer has reached its goal."""

    lasting: ClassVar[bool] = False
    limits: ClassVar[None] = None

    feed: Feed
    goal: Goal

    def question(self, position: Position | None) -> sql.Composed:
        return self.feed.passed(NOWHERE if position is None else position, self.goal)

    def shared(self, position: Position | None) -> None:
        return None

    def news(self, position: Position | None, answer: Any, now: float) -> Payload | None:
        self.goal = answer["goal"]
        return {"feed": self.feed.name, "passed": True} if answer["passed"] else None

    def failed(self) -> None:
        """Do nothing: this watch reports no metric."""

    def given_up(self) -> None:
        """Do nothing: this watch reports no metric."""

    def unless_at_work(self, held: bool, now: float) -> bool:
        return True


@dataclass
class IdleWatch:
    """Waits until a consumer is idle: no transaction holds its lock, and no lease is running."""

    lasting: ClassVar[bool] = False
    limits: ClassVar[None] = None

    feed: Feed

    def question(self, position: Position | None) -> sql.Composed:
        # Ask the source, because it has the leases even if the lock is in another database.
        return self.feed.locked()

    def shared(self, position: Position | None) -> None:
        return None

    def news(self, position: Position | None, answer: Any, now: float) -> Payload | None:
        return None if answer else {"feed": self.feed.name, "idle": True}

    def failed(self) -> None:
        """Do nothing: this watch reports no metric."""

    def given_up(self) -> None:
        """Do nothing: this watch reports no metric."""

    def unless_at_work(self, held: bool, now: float) -> bool:
        return not held


@dataclass
class ReplyWatch:
    """Waits until a message is in its queue."""

    lasting: ClassVar[bool] = False
    limits: ClassVar[None] = None

    feed: QueueFeed
    iid: str

    def question(self, position: Position | None) -> sql.Composed:
        return select("mbus.is_msg_exists", self.iid)

    def shared(self, position: Position | None) -> None:
        return None

    def news(self, position: Position | None, answer: Any, now: float) -> Payload | None:
        return {"feed": self.feed.name, "iid": self.iid} if answer else None

    def failed(self) -> None:
        """Do nothing: this watch reports no metric."""

    def given_up(self) -> None:
        """Do nothing: this watch reports no metric."""

    def unless_at_work(self, held: bool, now: float) -> bool:
        return True
