"""Poll the databases for all triggers in this process, over one shared connection to each database.

About ten times a second a ``Poller`` makes two pipelined round trips for all its subscribers. The first reads the
position of each consumer from the database that holds the progress. The second sends the query of each subscriber, which
needs that position, to the source. One query serves many feeds of a kind. A query that failed, for example because its
table is locked, is from then on sent alone, after the others. Each pair of databases has its own poller, so that an
unresponsive server delays no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import psycopg

from airflow_pgchange.errors import ConsumerBusy, PgChangeError, ServerUnavailable
from airflow_pgchange.feeds.queries import ask_all
from airflow_pgchange.triggers.connection_lookup import Lookups
from airflow_pgchange.triggers.loop_time import within
from airflow_pgchange.triggers.observations import limits_of, record
from airflow_pgchange.triggers.shared_connection import Connection, Link, Opener
from airflow_pgchange.triggers.shared_queries import Among, Question, Sharing
from airflow_pgchange.triggers.subscription import Subscription
from airflow_pgchange.triggers.watch_queries import Payload, Watch

ANSWER_WITHIN = 30.0
"""Seconds for the queries of all subscribers that are due, once the connections are open."""
RECORDED_WITHIN = 1.0
"""Seconds for which a poller's last subscriber, when it leaves, waits until its observation is recorded."""
TICK = 0.1
"""Seconds between two looks for new subscribers and due queries: a new subscriber waits at most this long."""


@dataclass(frozen=True)
class Patience:
    """How many seconds a query may take, and how many of these it may wait for locks."""

    timeout: float
    busy_timeout: float

    def settings(self) -> dict[str, str]:
        """The settings of PostgreSQL that enforce these limits."""
        limits = {"statement_timeout": self.timeout, "lock_timeout": self.busy_timeout}
        return {name: f"{max(round(1000 * seconds), 1)}ms" for name, seconds in limits.items()}


PATIENCE = Patience(timeout=5.0, busy_timeout=0.1)
"""The limits of a pipelined round trip. If its queries are sent one by one instead, ``busy_timeout`` is divided among
them."""


@dataclass(frozen=True)
class Clock:
    """The functions that return the time and that wait. Tests pass their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Poller:
    """Polls one pair of databases, of the progress and of the source, for all their subscribers."""

    def __init__(self, progress: Link, source: Link, clock: Clock) -> None:
        self.links = (progress, source)
        self.subscriptions: list[Subscription] = []
        self._clock = clock
        self._awaited, self._may_record = progress, True
        self._sharing = Sharing()
        self.recording = asyncio.Lock()
        """Held while observations are recorded."""

    async def run(self) -> None:
        """Poll until cancelled. If an unexpected error occurs, every subscription raises it."""
        try:
            while True:
                await self.poll()
                now = self._clock.now()
                next_due = min((s.due_at for s in self.subscriptions), default=now + TICK)
                await self._clock.sleep(min(max(0.0, next_due - now), TICK))
        except Exception as error:
            for subscription in self.subscriptions:
                subscription.queue.put_nowait(error)
            raise

    async def poll(self) -> None:
        """Send the queries of all subscribers that are due, once."""
        now = self._clock.now()
        active = [s for s in self.subscriptions if now >= s.due_at]
        if not active:
            return
        for group in ([s for s in active if not s.apart], [s for s in active if s.apart]):
            if group:
                await self._poll(group)
        await self._record(active)

    async def _poll(self, group: Sequence[Subscription]) -> None:
        try:
            # Open the connections before the timeout starts, because Airflow may be slow to return them.
            opened = {link: await link.connection() for link in self.links}
            async with within(ANSWER_WITHIN):
                await self._ask(group, opened)
        except TimeoutError:
            await self._awaited.close()
            self._fail(
                group, ServerUnavailable(f"{self._awaited.conn_id}: no answer within {ANSWER_WITHIN:g} s")
            )
        except (PgChangeError, psycopg.Error) as error:
            self._fail(group, _ours(error))

    async def _record(self, active: Sequence[Subscription]) -> None:
        """Record the observations. Best effort: an error fails the subscriptions only if the connection is lost."""
        now = self._clock.now()
        due = [s for s in active if s.watch.lasting and s.observations.is_due(now)]
        # If several subscriptions watch one feed, record the subscription that has woken its subscriber.
        due.sort(key=lambda s: s.observations.woke_at is not None)
        watchers = {s.watch.feed: s.observations for s in due}
        if watchers and self._may_record and (connection := self.links[0].opened) is not None:
            try:
                limits = limits_of(s.watch for s in self.subscriptions)
                async with self.recording, within(ANSWER_WITHIN):
                    self._may_record = await record(connection, watchers, now, limits)
            except TimeoutError:
                # The next poll opens the connection again.
                await connection.close()
            except (PgChangeError, psycopg.Error) as error:
                if connection.closed:
                    self._fail(active, _ours(error))

    async def _ask(self, active: Sequence[Subscription], opened: Mapping[Link, Connection]) -> None:
        progress, source = self.links

        async def each(
            link: Link,
            subscriptions: Sequence[Subscription],
            question: Question,
            among: Among = lambda subscription: None,
        ) -> dict[Subscription, Any]:
            self._awaited = link
            return await self._each(opened[link], subscriptions, question, among)

        started = self._clock.now()
        positions = await each(progress, active, lambda s: s.watch.feed.position())
        answers = await each(
            source,
            [s for s in active if s in positions],
            lambda s: s.watch.question(positions[s]),
            lambda s: s.watch.shared(positions[s]),
        )
        now = self._clock.now()
        due: list[tuple[Subscription, Payload]] = []
        for subscription, answer in answers.items():
            subscription.answered(answer, now, now - started)
            news = subscription.watch.news(positions[subscription], answer, now)
            if news is not None:
                due.append((subscription, news))
        ringing = [subscription for subscription, _ in due]
        held = await each(progress, ringing, lambda s: s.watch.feed.locked())
        for subscription, news in due:
            if subscription in held and subscription.watch.unless_at_work(bool(held[subscription]), now):
                subscription.queue.put_nowait(news)
                subscription.observations.woke_at = now

    async def _each(
        self, connection: Connection, active: Sequence[Subscription], question: Question, among: Among
    ) -> dict[Subscription, Any]:
        """Return the answers of all queries that succeed. If the queries fail together, send each alone, so that a query
        that fails does not affect the others."""
        if not any(s.apart for s in active):
            try:
                return await self._together(connection, active, question, among)
            except (PgChangeError, psycopg.Error):
                if connection.closed:
                    raise
        share = replace(PATIENCE, busy_timeout=PATIENCE.busy_timeout / max(len(active), 1))
        answers: dict[Subscription, Any] = {}
        for subscription in active:
            try:
                [answers[subscription]] = await ask_all(
                    connection, [question(subscription)], **share.settings()
                )
            except (PgChangeError, psycopg.Error) as error:
                if connection.closed:
                    raise
                subscription.fail(_ours(error), self._clock.now())
                subscription.apart = True
        return answers

    async def _together(
        self, connection: Connection, active: Sequence[Subscription], question: Question, among: Among
    ) -> dict[Subscription, Any]:
        """Return the answers of all queries, sent in one round trip. Raises if any query fails."""
        portions = self._sharing.portions(active, question, among, self._clock.now())
        try:
            values = await ask_all(connection, [portion.query for portion in portions], **PATIENCE.settings())
        except psycopg.errors.QueryCanceled:
            self._sharing.took_too_long(portions, self._clock.now())
            raise
        return dict(
            answer
            for portion, value in zip(portions, values, strict=True)
            for answer in portion.answers(value)
        )

    def _fail(self, active: Sequence[Subscription], error: PgChangeError) -> None:
        now = self._clock.now()
        for subscription in active:
            subscription.fail(error, now)


class Switchboard:
    """The pollers and connections of one event loop. Each exists as long as it has subscribers."""

    def __init__(self, opener: Opener | None = None, clock: Clock | None = None) -> None:
        self._lookups = Lookups()
        self._opener = opener or self._lookups.open
        self._clock = clock or Clock()
        self._links: dict[tuple[str, bool], Link] = {}
        self._pollers: dict[tuple[Link, Link], tuple[Poller, asyncio.Task[None]]] = {}

    @asynccontextmanager
    async def subscribe(
        self, watch: Watch, progress: str, source: str, interval: float, *, primary: bool = False
    ) -> AsyncIterator[Subscription]:
        """Yield a subscription to ``watch``: iterate over it for readings, failures and recoveries. It ends with the
        block.

        ``progress`` and ``source`` are Airflow connections. With ``primary`` the queries go to the source's primary,
        otherwise to any of its servers.
        """
        subscription = Subscription(watch, interval)
        at_progress = self._link(progress, True)
        at_source = at_progress if source == progress else self._link(source, primary)
        key = (at_progress, at_source)
        if key not in self._pollers or self._pollers[key][1].done():
            poller = Poller(at_progress, at_source, self._clock)
            # The context is empty so that the poller's log lines are attributed to no trigger.
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
            watch.given_up()
            if not poller.subscriptions:
                await self._end(key, poller, task)

    async def connect(self, conn_id: str) -> Connection:
        """Open a connection to the primary of an Airflow connection, for its caller alone.

        Raises AirflowUnavailable, InvalidArgument, and ServerUnavailable.
        """
        return await self._opener(conn_id, True)

    def _link(self, conn_id: str, primary: bool) -> Link:
        return self._links.setdefault((conn_id, primary), Link(conn_id, primary, self._opener))

    async def _end(self, key: tuple[Link, Link], poller: Poller, task: asyncio.Task[None]) -> None:
        if self._pollers[key][1] is task:
            del self._pollers[key]
        # A subscriber may leave with its news before the poller has recorded the observation: wait for the record.
        with suppress(TimeoutError):
            async with asyncio.timeout(RECORDED_WITHIN), poller.recording:
                pass
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
        needed = {link for pair in self._pollers for link in pair}
        for name, link in [item for item in self._links.items() if item[1] in set(key) - needed]:
            del self._links[name]
            if all(conn_id != link.conn_id for conn_id, _ in self._links):
                self._lookups.forget(link.conn_id)
            await link.close()


_BOARDS: WeakKeyDictionary[asyncio.AbstractEventLoop, Switchboard] = WeakKeyDictionary()


def switchboard() -> Switchboard:
    """Return the switchboard of this event loop."""
    return _BOARDS.setdefault(asyncio.get_running_loop(), Switchboard())


def _ours(error: PgChangeError | psycopg.Error) -> PgChangeError:
    message = str(error).strip()
    if isinstance(error, ConsumerBusy):
        return ConsumerBusy(f"a table that must be read is locked by another transaction: {message}")
    if isinstance(error, PgChangeError):
        return error
    if isinstance(error, psycopg.errors.QueryCanceled):
        return ServerUnavailable(f"no answer: {message}")
    return ServerUnavailable(message) if isinstance(error, psycopg.InterfaceError) else PgChangeError(message)
