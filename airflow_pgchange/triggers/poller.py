"""One shared connection a database for everything in this process that waits for feeds.

A ``Poller`` asks for all its subscribers in two pipelined round trips, about ten times a second: where each
consumer is (progress), and from there each subscriber's question (source). It takes at most a fifth of a backend's
time. Subscribers of other databases have pollers of their own, so that a server that does not answer delays nobody
else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from airflow.sdk.exceptions import AirflowException
from psycopg import sql

from airflow_pgchange.feeds.errors import InvalidArgument, PgChangeError, ServerUnavailable
from airflow_pgchange.feeds.queries import ask_all
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.triggers.watches import Payload, Watch

ANSWER_WITHIN = 30.0
FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0
TICK = 0.1
"""Seconds after which a new subscriber is asked about at the latest."""
REST = 4.0
"""How many times as long as a look took nobody asks again."""

Connection = psycopg.AsyncConnection[Any]
Opener = Callable[[str, bool], Awaitable[Connection]]


@dataclass(frozen=True)
class Trouble:
    """A question could not be answered; it is asked again in ``retry_in`` seconds."""

    error: PgChangeError
    retry_in: float


@dataclass(frozen=True)
class Recovered:
    """The first answer after trouble."""


News = Payload | Trouble | Recovered


@dataclass(frozen=True)
class Clock:
    """Where the time comes from, and how to wait; tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(eq=False)
class Subscription:
    """One subscriber: iterate over it for the news."""

    watch: Watch
    interval: float
    queue: asyncio.Queue[News | BaseException] = field(default_factory=asyncio.Queue)
    due_at: float = float("-inf")
    retry_in: float = FIRST_RETRY
    troubled: bool = False

    def __aiter__(self) -> AsyncIterator[News]:
        return self._news()

    async def _news(self) -> AsyncIterator[News]:
        while True:
            item = await self.queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def fail(self, error: PgChangeError, now: float) -> None:
        self.queue.put_nowait(Trouble(error, self.retry_in))
        self.troubled = True
        self.due_at = now + self.retry_in
        self.retry_in = min(2 * self.retry_in, LONGEST_RETRY)

    def answered(self, now: float, took: float) -> None:
        if self.troubled:
            self.queue.put_nowait(Recovered())
        self.troubled, self.retry_in = False, FIRST_RETRY
        self.due_at = now + max(self.interval - took, REST * took)


class Link:
    """The shared connection to one database, opened when it is first needed and again when it was lost."""

    def __init__(self, conn_id: str, primary: bool, opener: Opener) -> None:
        self.conn_id = conn_id
        self._primary = primary
        self._opener = opener
        self._opening = asyncio.Lock()
        self._connection: Connection | None = None

    async def connection(self) -> Connection:
        async with self._opening:
            if self._connection is None or self._connection.closed:
                self._connection = await self._opener(self.conn_id, self._primary)
            return self._connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()


class Poller:
    """Asks for all subscribers of one pair of databases."""

    def __init__(self, progress: Link, source: Link, clock: Clock) -> None:
        self.links = (progress, source)
        self.subscriptions: list[Subscription] = []
        self._clock = clock
        self._asked = progress

    async def run(self) -> None:
        """Ask until cancelled; an error that nobody foresaw ends every subscription with it."""
        try:
            while True:
                await self.look()
                now = self._clock.now()
                next_due = min((s.due_at for s in self.subscriptions), default=now + TICK)
                await self._clock.sleep(min(max(0.0, next_due - now), TICK))
        except Exception as error:
            for subscription in self.subscriptions:
                subscription.queue.put_nowait(error)
            raise

    async def look(self) -> None:
        """Ask once for all that are due."""
        now = self._clock.now()
        active = [s for s in self.subscriptions if now >= s.due_at]
        if not active:
            return
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                await self._ask(active)
        except TimeoutError:
            await self._asked.close()
            self._fail(
                active, ServerUnavailable(f"{self._asked.conn_id}: no answer within {ANSWER_WITHIN:g} s")
            )
        except (PgChangeError, psycopg.Error) as error:
            self._fail(active, _ours(error))

    async def _ask(self, active: Sequence[Subscription]) -> None:
        progress, source = self.links
        started = self._clock.now()
        positions = await self._each(progress, active, [s.watch.feed.position() for s in active])
        found = [s for s in active if s in positions]
        answers = await self._each(source, found, [s.watch.question(positions[s]) for s in found])
        now = self._clock.now()
        due: list[tuple[Subscription, Payload]] = []
        for subscription, answer in answers.items():
            subscription.answered(now, now - started)
            news = subscription.watch.news(positions[subscription], answer, now)
            if news is not None:
                due.append((subscription, news))
        ringing = [subscription for subscription, _ in due]
        held = await self._each(progress, ringing, [s.watch.feed.locked() for s in ringing])
        for subscription, news in due:
            if subscription in held and subscription.watch.unless_at_work(bool(held[subscription]), now):
                subscription.queue.put_nowait(news)

    async def _each(
        self, link: Link, asked: Sequence[Subscription], queries: Sequence[sql.Composed]
    ) -> dict[Subscription, Any]:
        """The answers of those that could be answered; one bad question must not blind the others."""
        self._asked = link
        connection = await link.connection()
        try:
            return dict(zip(asked, await ask_all(connection, queries), strict=True))
        except (PgChangeError, psycopg.Error):
            if connection.closed:
                raise
        answers: dict[Subscription, Any] = {}
        for subscription, query in zip(asked, queries, strict=True):
            try:
                [answers[subscription]] = await ask_all(connection, [query])
            except (PgChangeError, psycopg.Error) as error:
                if connection.closed:
                    raise
                subscription.fail(_ours(error), self._clock.now())
        return answers

    def _fail(self, active: Sequence[Subscription], error: PgChangeError) -> None:
        now = self._clock.now()
        for subscription in active:
            subscription.fail(error, now)


class Switchboard:
    """The pollers and links of one event loop, each there as long as somebody needs it."""

    def __init__(self, opener: Opener | None = None, clock: Clock | None = None) -> None:
        self._opener = opener or open_by_name
        self._clock = clock or Clock()
        self._links: dict[tuple[str, bool], Link] = {}
        self._pollers: dict[tuple[Link, Link], tuple[Poller, asyncio.Task[None]]] = {}

    @asynccontextmanager
    async def subscribe(
        self, watch: Watch, progress: str, source: str, interval: float, *, primary: bool = False
    ) -> AsyncIterator[Subscription]:
        """News of ``watch`` while the block runs. ``primary``: ask the source's primary, not just any of its
        servers.
        """
        subscription = Subscription(watch, interval)
        at_progress = self._link(progress, True)
        at_source = at_progress if source == progress else self._link(source, primary)
        key = (at_progress, at_source)
        if key not in self._pollers or self._pollers[key][1].done():
            poller = Poller(at_progress, at_source, self._clock)
            # An empty context: what the poller logs belongs to no trigger.
            self._pollers[key] = (
                poller,
                asyncio.create_task(poller.run(), name="pgchange-poller", context=Context()),
            )
        poller, task = self._pollers[key]
        poller.subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            poller.subscriptions.remove(subscription)
            if not poller.subscriptions:
                await self._end(key, task)

    def _link(self, conn_id: str, primary: bool) -> Link:
        return self._links.setdefault((conn_id, primary), Link(conn_id, primary, self._opener))

    async def _end(self, key: tuple[Link, Link], task: asyncio.Task[None]) -> None:
        if self._pollers[key][1] is task:
            del self._pollers[key]
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
        needed = {link for pair in self._pollers for link in pair}
        for name, link in [item for item in self._links.items() if item[1] in set(key) - needed]:
            del self._links[name]
            await link.close()


_BOARDS: WeakKeyDictionary[asyncio.AbstractEventLoop, Switchboard] = WeakKeyDictionary()


def switchboard() -> Switchboard:
    """The one of this event loop."""
    return _BOARDS.setdefault(asyncio.get_running_loop(), Switchboard())


async def open_by_name(conn_id: str, primary: bool) -> Connection:
    """Open an Airflow connection; read anew each time, so that a changed password is taken up."""
    try:
        return await PgChangeHook(conn_id).aget_conn(primary=primary)
    except AirflowException as error:
        raise InvalidArgument(f"connection {conn_id}: {error}") from error


def _ours(error: PgChangeError | psycopg.Error) -> PgChangeError:
    if isinstance(error, PgChangeError):
        return error
    kind = ServerUnavailable if isinstance(error, psycopg.InterfaceError) else PgChangeError
    return kind(str(error).strip())
