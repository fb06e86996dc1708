"""Watchers on a real server: the queries that subscribers of one process share, and how often the subscribers are
woken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import ConsumerBusy, ServerUnavailable, UnknownBranch
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, TubeFeed, end_position
from airflow_pgchange.feeds.connections import connect_async
from airflow_pgchange.feeds.feed import Position, Watched
from airflow_pgchange.feeds.queries import ask_all, select
from airflow_pgchange.triggers import poller
from airflow_pgchange.triggers.backlog_alarm import FIRST_PAUSE
from airflow_pgchange.triggers.feed import FeedTrigger, PointTrigger
from airflow_pgchange.triggers.poller import Clock, Patience, Switchboard
from airflow_pgchange.triggers.subscription import LONGEST_REST, Failure, Recovered, Subscription
from airflow_pgchange.triggers.watch_queries import BacklogWatch, LagLimits
from tests import tubes
from tests.ledger import Connect, make_ledger, writer
from tests.watching import FEED, NAME, first, process, uri_by_name


@pytest.fixture
def conn_id(db: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An Airflow connection to ``db`` with an application name, by which the test finds its sessions on the server."""
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri_by_name(db))
    return "airline"


@pytest.fixture
def db_with_ledger(db: str, connect: Connect) -> str:
    make_ledger(connect())
    return db


@pytest.fixture
def write(db_with_ledger: str, connect: Connect) -> Callable[[int], None]:
    """Insert this number of rows in one transaction."""
    return writer(connect())


async def next_news(subscription: Subscription) -> Any:
    async with asyncio.timeout(20):
        return await anext(aiter(subscription))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def connections(connect: Connect) -> int:
    row = (
        connect()
        .execute(
            "select count(*) from pg_stat_activity where application_name = %s and datname = current_database()",
            [NAME],
        )
        .fetchone()
    )
    return int(row[0]) if row else 0


async def test_all_that_waits_in_a_process_shares_one_connection(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    triggers: list[FeedTrigger | PointTrigger] = [
        FeedTrigger(CommitFeed(f"consumer_{number}", 0), conn_id) for number in range(20)
    ]
    triggers.append(PointTrigger(FEED, conn_id, None, end_position.point(connect(), FEED)))
    triggers.append(FeedTrigger(CommitFeed("stays", 0), conn_id, min_changes=1000))
    tasks = [asyncio.create_task(first(trigger)) for trigger in triggers]
    await until(lambda: connections(connect) > 0)
    late = asyncio.create_task(first(FeedTrigger(CommitFeed("late", 0), conn_id)))
    write(1)
    await late
    assert connections(connect) == 1
    for task in tasks:
        task.cancel()


async def test_airflows_own_trigger_for_queues_waits_for_a_feed(
    conn_id: str, write: Callable[[int], None]
) -> None:
    write(3)
    trigger = MessageQueueTrigger(scheme="pgchange", feed=FEED, postgres_conn_id=conn_id, min_changes=2)
    payload = await first(trigger)
    assert (payload["feed"], payload["ready"]) == ("commits:delays/0", 3)


async def test_the_last_one_to_leave_closes_the_connection(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    event = asyncio.create_task(first(FeedTrigger(FEED, conn_id)))
    await until(lambda: connections(connect) > 0)
    event.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await event
    await until(lambda: connections(connect) == 0)


async def test_a_feed_that_cannot_be_watched_does_not_stop_other_watchers(
    conn_id: str, write: Callable[[int], None]
) -> None:
    bad = asyncio.create_task(first(FeedTrigger(CommitFeed("delays", 999), conn_id)))
    await asyncio.sleep(0.3)
    write(1)
    assert (await first(FeedTrigger(FEED, conn_id)))["ready"] == 1
    assert not bad.done()
    bad.cancel()


def board_of(db: str, clock: Clock | None = None) -> Switchboard:
    async def opener(conn_id: str, primary: bool) -> Any:
        return await connect_async(make_conninfo(db, application_name=NAME), primary=primary)

    return Switchboard(opener, clock)


@contextlib.asynccontextmanager
async def watched(
    db: str, clock: Clock | None = None, feed: CommitFeed = FEED
) -> AsyncIterator[Subscription]:
    board = board_of(db, clock)
    async with board.subscribe(BacklogWatch(feed), "airline", "airline", 0.05) as subscription:
        yield subscription


async def test_a_lost_connection_is_said_and_opened_again(
    db: str, connect: Connect, write: Callable[[int], None]
) -> None:
    async with watched(db) as subscription:
        await until(lambda: connections(connect) > 0)
        connect().execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = %s and datname = current_database()",
            [NAME],
        )
        failure = await next_news(subscription)
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, ServerUnavailable)
        assert isinstance(await next_news(subscription), Recovered)
        write(1)
        assert (await next_news(subscription))["ready"] == 1


async def test_a_server_that_is_down_is_asked_less_and_less_often(own_cluster: Any) -> None:
    own_cluster.stop("immediate")
    clock = FakeClock()
    async with watched(own_cluster.conninfo(), clock.clock()) as subscription:
        pauses = [(await next_news(subscription)).retry_in for _ in range(7)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


async def test_a_branch_that_comes_later_is_found(
    db: str, connect: Connect, write: Callable[[int], None]
) -> None:
    async with watched(db, FakeClock().clock(), CommitFeed("delays", 5)) as subscription:
        failure = await next_news(subscription)
        assert isinstance(failure.error, UnknownBranch)
        connect().execute(
            "insert into revision.branch (id, type) overriding system value values (5, 'stable')"
        )
        news = await next_news(subscription)
        while isinstance(news, Failure):
            news = await next_news(subscription)
        assert isinstance(news, Recovered)


class FakeClock:
    """A clock that advances only while somebody sleeps. ``at`` has the calls to make when their time has come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: list[tuple[float, Callable[[], None]]] = []

    async def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.5)
        while self.at and self.at[0][0] <= self.now:
            self.at.pop(0)[1]()
        await asyncio.sleep(0)

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep)


async def heard(db: str, clock: FakeClock, until: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Run a watch for the first ``until`` seconds of the clock, and return the times at which it woke its subscriber."""
    times: list[float] = []
    errors: list[BaseException] = []

    def note(news: Any) -> None:
        if isinstance(news, BaseException):
            errors.append(news)
        times.append(clock.now)

    async with watched(db, clock.clock()) as subscription:
        monkeypatch.setattr(subscription.queue, "put_nowait", note)
        while clock.now < until and not errors:
            await asyncio.sleep(0.001)
    if errors:
        raise errors[0]
    return times


async def test_a_batch_of_minutes_gives_at_most_two_wake_ups(
    db: str, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker holds the consumer for minutes.

    Without a worker, a consumer would be woken up to four times in this time.
    """
    write(10)
    clock = FakeClock()
    transaction = ConsumerTransaction(FEED, db)

    def begin() -> None:
        transaction.__enter__()
        transaction.claim(1000)

    def end() -> None:
        write(5)
        transaction.ack()
        transaction.__exit__(None, None, None)

    clock.at = [(3.0, begin), (123.0, end)]
    times = await heard(db, clock, 130.0, monkeypatch)
    assert not clock.at
    assert len(times) == 2
    assert times[1] >= 123.0


async def test_ten_rows_in_one_transaction_leave_nothing_stranded(
    db: str, write: Callable[[int], None]
) -> None:
    write(10)
    clock = FakeClock()
    done: list[int] = []
    async with watched(db, clock.clock()) as subscription:
        while sum(done) < 10:
            await next_news(subscription)
            done.append(await asyncio.to_thread(process, db, 4))
    assert done == [4, 4, 2]


async def test_a_failing_consumer_is_woken_again_but_not_in_a_hurry(
    db: str, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)
    times = await heard(db, FakeClock(), 120.0, monkeypatch)
    assert len(times) <= 4
    assert times[1] - times[0] >= FIRST_PAUSE


async def test_a_slow_subscriber_delays_no_fast_one(db: str, write: Callable[[int], None]) -> None:
    async def opener(conn_id: str, primary: bool) -> Any:
        return await connect_async(db, primary=primary)

    board, slow, fast = Switchboard(opener), CommitFeed("slow", 0), CommitFeed("fast", 0)
    async with board.subscribe(BacklogWatch(slow), "airline", "airline", 600) as first:
        await until(lambda: first.due_at > 0)
        write(1)
        async with board.subscribe(BacklogWatch(fast), "airline", "airline", 0.05) as second:
            assert (await next_news(second))["feed"] == fast.name
        assert first.queue.empty()


class Sleeping(BacklogWatch):
    """A watch whose query sleeps for a minute."""

    def question(self, position: Position | None) -> sql.Composed:
        return select("pg_catalog.pg_sleep", 60)

    def shared(self, position: Position | None) -> None:
        return None


async def test_a_source_that_does_not_answer_takes_nothing_from_another(
    db: str, other_db: str, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "ANSWER_WITHIN", 3.0)
    monkeypatch.setattr(poller, "PATIENCE", replace(poller.PATIENCE, timeout=60.0))
    servers = {"here": db, "there": other_db}

    async def opener(conn_id: str, primary: bool) -> Any:
        return await connect_async(make_conninfo(servers[conn_id], application_name=NAME), primary=primary)

    board = Switchboard(opener)
    async with (
        board.subscribe(BacklogWatch(FEED), "here", "here", 0.05) as healthy,
        board.subscribe(Sleeping(FEED), "here", "there", 0.05) as stuck,
    ):
        failure = await next_news(stuck)
        assert isinstance(failure, Failure)
        assert "there: no answer" in str(failure.error)
        assert healthy.queue.empty()
        write(1)
        assert (await next_news(healthy))["ready"] == 1


async def test_when_somebody_was_woken_is_noted(
    db: str, connect: Connect, write: Callable[[int], None]
) -> None:
    board, people = board_of(db, FakeClock().clock()), connect()
    woken = "select woke_at is not null from pgchange.watchers()"
    async with board.subscribe(BacklogWatch(FEED), "airline", "airline", 0.05) as watched:
        await until(lambda: people.execute(woken).fetchall() == [(False,)])
        write(1)
        await next_news(watched)
        await until(lambda: people.execute(woken).fetchall() == [(True,)])


async def test_the_strictest_limits_of_who_watches_a_feed_are_noted(
    db_with_ledger: str, connect: Connect
) -> None:
    board, people = board_of(db_with_ledger, FakeClock().clock()), connect()
    limits = "select max_lag, max_backlog from pgchange.watchers()"

    def watching(given: LagLimits | None) -> AbstractAsyncContextManager[Subscription]:
        return board.subscribe(BacklogWatch(FEED, limits=given), "airline", "airline", 0.05)

    async with watching(LagLimits(60.0, 5)), watching(LagLimits(30.0)), watching(None):
        await until(lambda: people.execute(limits).fetchall() == [(timedelta(seconds=30), 5)])


async def test_a_watcher_that_ends_when_it_fires_has_recorded_when(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    people, woken = connect(), "select woke_at is not null from pgchange.watchers()"
    event = asyncio.create_task(first(FeedTrigger(FEED, conn_id, once=True)))
    await until(lambda: people.execute(woken).fetchall() == [(False,)])
    write(1)
    await event
    assert people.execute(woken).fetchall() == [(True,)]


@pytest.fixture
def locked_tube(db: str, connect: Connect) -> tuple[TubeFeed, psycopg.Connection[Any]]:
    """A tube, and a transaction that locks its pods."""
    tubes.make(connect(), "q")
    lock = connect()
    lock.execute("begin; lock table q in access exclusive mode")
    return TubeFeed("q"), lock


async def test_a_locked_table_blinds_nobody_but_who_watches_it(
    db: str,
    connect: Connect,
    write: Callable[[int], None],
    locked_tube: tuple[TubeFeed, psycopg.Connection[Any]],
) -> None:
    tube, lock = locked_tube
    board, people = board_of(db, FakeClock().clock()), connect()
    async with (
        board.subscribe(BacklogWatch(FEED), "airline", "airline", 0.05) as healthy,
        board.subscribe(BacklogWatch(tube), "airline", "airline", 0.05) as stuck,
    ):
        troubles = [await next_news(stuck) for _ in range(3)]
        write(1)
        assert (await next_news(healthy))["ready"] == 1
        assert healthy.queue.empty()
        noted = dict(people.execute("select feed, error from pgchange.watchers()").fetchall())
        lock.execute("rollback")
        while isinstance(news := await next_news(stuck), Failure):
            troubles.append(news)
    assert isinstance(news, Recovered)
    assert all(isinstance(failure.error, ConsumerBusy) for failure in troubles)
    assert max(failure.retry_in for failure in troubles) == LONGEST_REST
    assert noted[FEED.name] is None
    assert "locked by another transaction" in noted[tube.name]


async def test_a_question_that_takes_too_long_blinds_nobody_else(
    db: str, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "PATIENCE", replace(poller.PATIENCE, timeout=1.0))
    slow: Watched = CommitFeed("slow", 0)
    board = board_of(db, FakeClock().clock())
    async with (
        board.subscribe(Sleeping(slow), "airline", "airline", 0.05) as stuck,
        board.subscribe(BacklogWatch(FEED), "airline", "airline", 0.05) as healthy,
    ):
        failure = await next_news(stuck)
        assert isinstance(failure.error, ServerUnavailable)
        assert "statement timeout" in str(failure.error)
        write(1)
        assert (await next_news(healthy))["ready"] == 1


async def test_the_limits_of_a_look_end_with_it(db: str) -> None:
    limits = [
        select("pg_catalog.current_setting", name, True) for name in ("statement_timeout", "lock_timeout")
    ]
    async with await connect_async(db) as connection:
        before = await ask_all(connection, limits)
        assert await ask_all(connection, limits, **Patience(5.0, 0.0001).settings()) == ["5s", "1ms"]
        assert await ask_all(connection, limits) == before
