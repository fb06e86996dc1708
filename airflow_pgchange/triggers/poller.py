"""Poll the databases for all triggers in this process, over one shared connection to each database.

About ten times a second a ``Poller`` makes two pipelined round trips for all its subscribers. The first asks the database
of the progress for the position of each consumer. The second asks the source the question of each subscriber, given that
position; one query serves many feeds of a kind. A question that failed, for example because its table is locked, is asked
alone from then on, after the others. Each pair of databases has a poller of its own, so that a server that does not
answer delays no other.
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
from airflow_pgchange.triggers.last_seen import limits_of, note
from airflow_pgchange.triggers.link import Connection, Link, Opener
from airflow_pgchange.triggers.lookups import Lookups
from airflow_pgchange.triggers.loop_time import within
from airflow_pgchange.triggers.sharing import Among, Question, Sharing
from airflow_pgchange.triggers.subscription import Subscription
from airflow_pgchange.triggers.watches import Payload, Watch

ANSWER_WITHIN = 30.0
"""Seconds for the questions of all subscribers that are due, once the connections are open."""
NOTED_WITHIN = 1.0
"""Seconds for which the last subscriber of a poller, when it leaves, waits for the record of its observation."""
TICK = 0.1
"""The longest time in seconds until the question of a new subscriber is asked."""


@dataclass(frozen=True)
class Patience:
    """How many seconds a question may take, and how many of these it may wait for locks."""

    timeout: float
    busy_timeout: float

    def settings(self) -> dict[str, str]:
        """The settings of PostgreSQL that enforce these limits."""
        limits = {"statement_timeout": self.timeout, "lock_timeout": self.busy_timeout}
        return {name: f"{max(round(1000 * seconds), 1)}ms" for name, seconds in limits.items()}


PATIENCE = Patience(timeout=5.0, busy_timeout=0.1)
"""The limits of one round trip. Questions that are asked one by one share ``busy_timeout``."""


@dataclass(frozen=True)
class Clock:
    """The source of the time, and the function that waits. Tests use their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Poller:
    """Polls one pair of databases, of the progress and of the source, for all their subscribers."""

    def __init__(self, progress: Link, source: Link, clock: Clock) -> None:
        self.links = (progress, source)
        self.subscriptions: list[Subscription] = []
        self._clock = clock
        self._asked, self._notes = progress, True
        self._sharing = Sharing()
        self.noting = asyncio.Lock()
        """Held while observations are recorded."""

    async def run(self) -> None:
        """Poll until cancelled. An unexpected error ends every subscription with this error."""
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
        """Ask the questions of all subscribers that are due, once."""
        now = self._clock.now()
        active = [s for s in self.subscriptions if now >= s.due_at]
        if not active:
            return
        for asked in ([s for s in active if not s.apart], [s for s in active if s.apart]):
            if asked:
                await self._look_at(asked)
        await self._note(active)

    async def _look_at(self, asked: Sequence[Subscription]) -> None:
        try:
            # Open the connections before the timeout starts, because Airflow may be slow to return them.
            opened = {link: await link.connection() for link in self.links}
            async with within(ANSWER_WITHIN):
                await self._ask(asked, opened)
        except TimeoutError:
            await self._asked.close()
            self._fail(
                asked, ServerUnavailable(f"{self._asked.conn_id}: no answer within {ANSWER_WITHIN:g} s")
            )
        except (PgChangeError, psycopg.Error) as error:
            self._fail(asked, _ours(error))

    async def _note(self, active: Sequence[Subscription]) -> None:
        """Record the observations. This is best effort: subscribers are told only if the connection was lost."""
        now = self._clock.now()
        due = [s for s in active if s.watch.lasting and s.sight.is_due(now)]
        # If several subscriptions watch one feed, record the one that has woken its subscriber.
        told = {s.watch.feed: s.sight for s in sorted(due, key=lambda s: s.sight.woke_at is not None)}
        if told and self._notes and (connection := self.links[0].opened) is not None:
            try:
                limits = limits_of(s.watch for s in self.subscriptions)
                async with self.noting, within(ANSWER_WITHIN):
                    self._notes = await note(connection, told, now, limits)
            except TimeoutError:
                # The next poll opens it again.
                await connection.close()
            except (PgChangeError, psycopg.Error) as error:
                if connection.closed:
                    self._fail(active, _ours(error))

    async def _ask(self, active: Sequence[Subscription], opened: Mapping[Link, Connection]) -> None:
        progress, source = self.links

        async def each(
            link: Link,
            asked: Sequence[Subscription],
            question: Question,
            among: Among = lambda subscription: None,
        ) -> dict[Subscription, Any]:
            self._asked = link
            return await self._each(opened[link], asked, question, among)

        started = self._clock.now()
        positions = await each(progress, active, lambda s: s.watch.feed.position())
        found = [s for s in active if s in positions]
        answers = await each(
            source,
            found,
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
                subscription.sight.woke_at = now

    async def _each(
        self,
        connection: Connection,
        asked: Sequence[Subscription],
        question: Question,
        among: Among,
    ) -> dict[Subscription, Any]:
        """Return the answers to all questions that could be answered. A question that fails must not affect the
        others."""
        if not any(s.apart for s in asked):
            try:
                return await self._together(connection, asked, question, among)
            except (PgChangeError, psycopg.Error):
                if connection.closed:
                    raise
        share = replace(PATIENCE, busy_timeout=PATIENCE.busy_timeout / max(len(asked), 1))
        answers: dict[Subscription, Any] = {}
        for subscription in asked:
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
        self, connection: Connection, asked: Sequence[Subscription], question: Question, among: Among
    ) -> dict[Subscription, Any]:
        """Return the answers to all questions, asked in one round trip. Raises if one of them fails."""
        portions = self._sharing.portions(asked, question, among, self._clock.now())
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
    """The pollers and links of one event loop. Each exists as long as it has subscribers."""

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
        """Yield a subscription to the news of ``watch``, which ends with the block.

        ``progress`` and ``source`` are Airflow connections. With ``primary`` the source's primary is asked; otherwise
        any of its servers may be.
        """
        subscription = Subscription(watch, interval)
        at_progress = self._link(progress, True)
        at_source = at_progress if source == progress else self._link(source, primary)
        key = (at_progress, at_source)
        if key not in self._pollers or self._pollers[key][1].done():
            poller = Poller(at_progress, at_source, self._clock)
            # An empty context, because the log lines of the poller belong to no trigger.
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
        # A subscriber leaves when it gets its news, which may be before the poller has recorded the observation.
        with suppress(TimeoutError):
            async with asyncio.timeout(NOTED_WITHIN), poller.noting:
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
