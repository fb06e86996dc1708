"""When a subscriber is queried again, and the timeouts of a query for many subscribers, on a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import sql

from airflow_pgchange.errors import (
    ConsumerBusy,
    InvalidArgument,
    PgChangeError,
    ServerUnavailable,
    UnknownBranch,
)
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.triggers import feed as feed_triggers
from airflow_pgchange.triggers import poller
from airflow_pgchange.triggers.feed import FeedTrigger, PointTrigger
from airflow_pgchange.triggers.poller import PATIENCE, TICK, Clock, Poller, Switchboard
from airflow_pgchange.triggers.shared_queries import EACH_BY_ITSELF_FOR
from airflow_pgchange.triggers.subscription import LONGEST_RETRY, REST, Subscription
from airflow_pgchange.triggers.watch_queries import BacklogWatch
from airflow_pgchange.utils import metrics
from tests.watching import FEED, first

EMPTY = {"ready": 0, "waiting": 0, "ready_age": None}


def subscription(interval: float = 0.1, consumer: str = "delays") -> Subscription:
    return Subscription(BacklogWatch(CommitFeed(consumer, 0)), interval)


def rest_after(took: float, interval: float = 0.1) -> float:
    subscribed = subscription(interval)
    subscribed.answered(EMPTY, 0.0, took)
    return subscribed.due_at


def test_the_longer_a_look_takes_the_longer_it_rests() -> None:
    assert rest_after(0.2) == REST * 0.2


def test_a_rest_is_two_seconds_at_most_whatever_the_look_took() -> None:
    assert rest_after(10.0) == 2.0


def test_a_subscriber_with_a_long_interval_pauses_ten_intervals_at_most() -> None:
    assert rest_after(10.0, interval=1.0) == 10.0


def pauses(error: PgChangeError, interval: float = 0.1) -> list[float]:
    subscribed, found = subscription(interval), []
    for _ in range(7):
        subscribed.fail(error, 0.0)
        found.append(subscribed.due_at)
    return found


def test_a_locked_feed_is_queried_every_two_seconds() -> None:
    assert pauses(ConsumerBusy("locked")) == [1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("error", [ServerUnavailable("down"), UnknownBranch("no branch 9")])
def test_a_feed_that_fails_is_queried_less_and_less_often(error: PgChangeError) -> None:
    assert pauses(error) == [1, 2, 4, 8, 16, 30, 30]


@pytest.fixture
def blindness(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Record each report that a feed cannot be watched, or can be watched again."""
    reported: list[tuple[str, bool]] = []
    monkeypatch.setattr(metrics, "report_sight", lambda feed, *, blind: reported.append((feed, blind)))
    return reported


def test_a_feed_that_cannot_be_watched_is_a_metric(blindness: list[tuple[str, bool]]) -> None:
    subscription().fail(UnknownBranch("no branch 9"), 0.0)
    assert blindness == [("commits:delays/0", True)]


def test_a_lock_is_a_metric_once_it_has_lasted(blindness: list[tuple[str, bool]]) -> None:
    subscribed, reported = subscription(), []
    for now in (0.0, LONGEST_RETRY - 0.1, LONGEST_RETRY):
        subscribed.fail(ConsumerBusy("locked"), now)
        reported.append(len(blindness))
    assert reported == [0, 0, 1]


def test_a_lock_that_was_released_meanwhile_is_another(blindness: list[tuple[str, bool]]) -> None:
    subscribed = subscription()
    subscribed.fail(ConsumerBusy("locked"), 0.0)
    subscribed.answered(EMPTY, 1.0, 0.1)
    subscribed.fail(ConsumerBusy("locked"), LONGEST_RETRY)
    assert blindness == []


async def test_a_feed_that_is_no_longer_watched_is_not_reported_as_blind(
    blindness: list[tuple[str, bool]],
) -> None:
    async def down(conn_id: str, primary: bool) -> Any:
        raise ServerUnavailable("down")

    watch = BacklogWatch(CommitFeed("delays", 0))
    async with Switchboard(down).subscribe(watch, "airline", "airline", 0.1) as subscribed:
        await anext(aiter(subscribed))
    assert [blind for _, blind in blindness] == [True, False]


class Server:
    """Answers queries about some consumers. It holds a lock on the tables of the others, and records the queries."""

    def __init__(self, *locked: str) -> None:
        self.locked = locked
        self.asked: list[tuple[int, float]] = []
        self.conn_id, self.closed = "airline", False

    async def connection(self) -> Server:
        return self

    async def close(self) -> None:
        self.closed = True

    @property
    def opened(self) -> None:
        return None

    async def ask_all(self, _: object, queries: Sequence[sql.Composed], **settings: str) -> list[Any]:
        texts = [query.as_string(None) for query in queries]
        if not queries:
            return []
        patience = float(settings["lock_timeout"].removesuffix("ms")) / 1000
        self.asked.append((sum(max(1, many(text)) for text in texts), patience))
        if any(f"'{name}'" in text for text in texts for name in self.locked):
            raise ConsumerBusy("lock timeout")
        return [[EMPTY] * many(text) or (EMPTY if '"lag"(' in text else None) for text in texts]


def many(text: str) -> int:
    """Return the number of consumers whose lag a query returns together."""
    return text.count('"branch_id"') if '"lags"(' in text else 0


async def looked(
    server: Server, names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Poller, SimpleNamespace]:
    """Return a poller that has polled the consumers with these names once."""
    monkeypatch.setattr(poller, "ask_all", server.ask_all)
    time = SimpleNamespace(now=0.0)
    link: Any = server
    watcher = Poller(link, link, Clock(lambda: time.now))
    watcher.subscriptions = [subscription(consumer=name) for name in names]
    await watcher.poll()
    return watcher, time


async def test_many_that_are_locked_share_the_patience_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"locked {number}" for number in range(20)]
    server = Server(*names)
    await looked(server, names, monkeypatch)
    assert sum(patience for _, patience in server.asked) == pytest.approx(2 * PATIENCE.busy_timeout)


async def test_a_locked_feed_is_queried_by_itself_and_the_others_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server("locked")
    watcher, time = await looked(server, ["one", "locked", "two"], monkeypatch)
    time.now = 100.0
    server.asked.clear()
    await watcher.poll()
    assert [count for count, _ in server.asked] == [2, 2, 1]


async def test_all_feeds_of_a_kind_are_asked_in_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[str] = []

    class Heard(Server):
        async def ask_all(self, _: object, asked: Sequence[sql.Composed], **settings: str) -> list[Any]:
            queries.extend(query.as_string(None) for query in asked)
            return await super().ask_all(_, asked, **settings)

    await looked(Heard(), ["one", "two", "three"], monkeypatch)
    assert [many(query) for query in queries if '"lag' in query] == [3]


async def test_a_query_asks_about_fifty_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query for many consumers has the same timeout as a query for one."""
    sizes: list[int] = []

    class Heard(Server):
        async def ask_all(self, _: object, asked: Sequence[sql.Composed], **settings: str) -> list[Any]:
            sizes.extend(many(query.as_string(None)) for query in asked)
            return await super().ask_all(_, asked, **settings)

    watcher, _ = await looked(Heard(), [f"number {number}" for number in range(120)], monkeypatch)
    assert [size for size in sizes if size] == [50, 50, 20]
    assert all(subscribed.observations.latest is not None for subscribed in watcher.subscriptions)


async def test_feeds_whose_shared_query_is_too_slow_are_queried_one_by_one_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cancelled: list[float] = []

    class Slow(Server):
        async def ask_all(self, _: object, asked: Sequence[sql.Composed], **settings: str) -> list[Any]:
            if any(many(query.as_string(None)) > 1 for query in asked):
                cancelled.append(time.now)
                raise psycopg.errors.QueryCanceled("statement timeout")
            return await super().ask_all(_, asked, **settings)

    time = SimpleNamespace(now=0.0)
    watcher, time = await looked(Slow(), ["one", "two", "three"], monkeypatch)
    for time.now in (10.0, EACH_BY_ITSELF_FOR - 1.0, EACH_BY_ITSELF_FOR + 1.0):
        await watcher.poll()
    assert cancelled == [0.0, EACH_BY_ITSELF_FOR + 1.0]


async def test_feeds_that_are_queried_one_by_one_share_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Server):
        async def ask_all(self, _: object, asked: Sequence[sql.Composed], **settings: str) -> list[Any]:
            if any(many(query.as_string(None)) > 1 for query in asked):
                raise psycopg.errors.QueryCanceled("statement timeout")
            return await super().ask_all(_, asked, **settings)

    server = Slow()
    watcher, time = await looked(server, ["one", "two", "three"], monkeypatch)
    server.asked.clear()
    time.now = 10.0
    await watcher.poll()
    assert [count for count, _ in server.asked] == [3, 3]


async def test_an_unlocked_feed_is_queried_with_the_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("locked")
    watcher, time = await looked(server, ["one", "locked", "two"], monkeypatch)
    server.locked = ()
    for time.now in (100.0, 200.0):
        server.asked.clear()
        await watcher.poll()
    assert [count for count, _ in server.asked] == [3, 3]


@pytest.mark.parametrize(
    ("due", "rest"), [([], TICK), ([5.0 + TICK / 2], TICK / 2), ([4.0], 0.0), ([100.0], TICK)]
)
async def test_a_poller_rests_until_somebody_is_due_and_no_longer_than_a_tick(
    due: list[float], rest: float
) -> None:
    rests: list[float] = []

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        raise asyncio.CancelledError

    server: Any = Server()
    watcher = Poller(server, server, Clock(lambda: 5.0, sleep))
    watcher.subscriptions = [subscription() for _ in due]
    for subscribed, at in zip(watcher.subscriptions, due, strict=True):
        subscribed.due_at = at
    watcher.poll = never  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await watcher.run()
    assert rests == [pytest.approx(rest)]


async def never() -> None:
    """Query nothing."""


@pytest.mark.parametrize(
    ("trigger", "of_changes"),
    [
        (FeedTrigger(FEED, "results", "changes", once=True), False),
        (PointTrigger(FEED, "results", "changes", {}), True),
    ],
    ids=["lag", "point"],
)
async def test_progress_is_asked_of_the_primary_and_changes_of_any_server_but_for_a_point(
    trigger: FeedTrigger | PointTrigger, of_changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    primaries: dict[str, bool] = {}
    server = Server()

    async def opener(conn_id: str, primary: bool) -> Any:
        primaries[conn_id] = primary
        if conn_id == "changes":
            raise InvalidArgument("it has been asked")
        return server

    async def noted(*_: object) -> bool:
        return False

    monkeypatch.setattr(poller, "ask_all", server.ask_all)
    monkeypatch.setattr(poller, "record", noted)
    monkeypatch.setattr(feed_triggers, "switchboard", lambda: Switchboard(opener))
    assert (await first(trigger))["error"] == "it has been asked"
    assert primaries == {"results": True, "changes": of_changes}
