"""What a poller asks for its subscribers: how far behind a consumer is, or whether it has come far enough."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from psycopg import sql

from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.feed import NOWHERE, Feed, Goal, Position, Watched
from airflow_pgchange.feeds.queries import select
from airflow_pgchange.feeds.queue import QueueFeed
from airflow_pgchange.triggers.alarm import Alarm
from airflow_pgchange.utils import metrics

Payload = dict[str, Any]
Asked = tuple[Watched, Position, int]
"""What the lag of one feed is asked with: the feed, the consumer's progress, and how far to count."""


class Watch(Protocol):
    """One question about one feed, asked again and again; ``lasting`` where it is never answered for good."""

    lasting: ClassVar[bool]

    @property
    def feed(self) -> Watched: ...

    def question(self, position: Position | None) -> sql.Composed:
        """The query for the source, given the consumer's progress."""

    def shared(self, position: Position | None) -> Asked | None:
        """What ``lags`` is given to ask the same together with others of the kind; None for what is asked by itself."""

    def news(self, position: Position | None, answer: Any, now: float) -> Payload | None:
        """What to tell the subscriber, plain JSON; None for nothing."""

    def failed(self) -> None:
        """The question could not be answered."""

    def given_up(self) -> None:
        """Nobody asks it any longer."""

    def unless_at_work(self, held: bool, now: float) -> bool:
        """Whether to tell it, now that it is known whether a consumer holds the lock."""


@dataclass
class BacklogWatch:
    """Tells of a backlog that nobody works on."""

    lasting: ClassVar[bool] = True

    feed: Watched
    min_changes: int = 1
    max_age: float | None = None
    _alarm: Alarm = field(init=False)
    _meter: metrics.Meter = field(init=False)

    def __post_init__(self) -> None:
        self._alarm = Alarm(self.min_changes, self.max_age)
        self._meter = metrics.Meter(self.feed.name)

    def question(self, position: Position | None) -> sql.Composed:
        return self.feed.lag(NOWHERE if position is None else position, self.min_changes)

    def shared(self, position: Position | None) -> Asked | None:
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
    """Tells, once, that a consumer has come to its goal."""

    lasting: ClassVar[bool] = False

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
        """It is not for people."""

    def given_up(self) -> None:
        """Nor is that."""

    def unless_at_work(self, held: bool, now: float) -> bool:
        return True


@dataclass
class ReplyWatch:
    """Tells, once, that a message is there."""

    lasting: ClassVar[bool] = False

    feed: QueueFeed
    iid: str

    def question(self, position: Position | None) -> sql.Composed:
        return select("mbus.is_msg_exists", self.iid)

    def shared(self, position: Position | None) -> None:
        return None

    def news(self, position: Position | None, answer: Any, now: float) -> Payload | None:
        return {"feed": self.feed.name, "iid": self.iid} if answer else None

    def failed(self) -> None:
        """It is not for people."""

    def given_up(self) -> None:
        """Nor is that."""

    def unless_at_work(self, held: bool, now: float) -> bool:
        return True
