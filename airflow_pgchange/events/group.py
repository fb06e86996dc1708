"""A group whose lock is held: read its events, and write its cursor, retries and dead letters, on one connection."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import ConnectionLost, ConsumerBusy, ServerUnavailable, Stopped
from airflow_pgchange.events.dispatch import dispatch
from airflow_pgchange.events.event import Event, shown, text_of
from airflow_pgchange.events.handler import RETRY
from airflow_pgchange.events.subscriptions import heartbeat
from airflow_pgchange.feeds.connections import connect, keep_open
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask, call, records, rows, select
from airflow_pgchange.feeds.retries import succeeds
from airflow_pgchange.feeds.watched_connection import session_patience

PORTION_BYTES = 8 * 2**20
"""Approximate maximum of bytes of events in one retry or dead letter. More events are split over several."""
MOST_ATTEMPTS = 1_000_000
"""A retry with a higher attempt number is malformed: this package does not write such."""


@dataclass(frozen=True)
class Retry:
    """Events that are delivered to one handler again.

    ``event`` is the event that schedules the retry. Its ``subscriptions`` are all subscriptions of the first delivery.
    ``problem``: why the retry is impossible, or None.
    """

    event: Event
    handler: str
    attempt: int = 1
    events: tuple[Event, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Read:
    """A batch of a group, and the cursor after it."""

    events: tuple[Event, ...]
    retries: tuple[Retry, ...]
    cursor: str

    @property
    def count(self) -> int:
        return len(self.events) + len(self.retries)


@dataclass(frozen=True)
class Failure:
    """Events on which a handler failed in attempt number ``attempt``.

    ``pause``: seconds until the next attempt; None if this was the last. ``subscriptions``: the subscriptions through
    which the handler gets these events.
    """

    handler: str
    subscriptions: tuple[str, ...]
    attempt: int
    events: tuple[Event, ...]
    error: str
    pause: float | None


class Group:
    """Reads and writes a group under the lock that its connection holds.

    ``more``: whether undispatched events waited after the last dispatch, so that reading again at once may return some.
    """

    def __init__(self, connection: psycopg.Connection[Any], name: str) -> None:
        self.name = name
        self.more = False
        self._connection = connection

    def read(self, cursor: str | None, limit: int) -> Read | None:
        """Return the next batch after a cursor, or after the stored cursor; None if nothing is ready.

        If nothing is ready, a chunk is dispatched first. Raises UnknownConsumer and DispatchEnded.
        """
        batch = self._next(cursor, limit)
        if not batch:
            chunk = dispatch(self._connection)
            self.more = chunk.more
            batch = self._next(cursor, limit) if chunk.pairs else []
        if not batch:
            return None
        events = [_event(row) for row in batch]
        return Read(
            events=tuple(event for event in events if event.topic != RETRY),
            retries=tuple(self._retry(event) for event in events if event.topic == RETRY),
            cursor=batch[-1]["next_cursor"],
        )

    def keep(self, failures: Sequence[Failure], cursor: str | None) -> int:
        """Schedule retries of the failures and move the cursor, atomically. Return how many failures are retried.

        A failure after its last attempt, or whose subscriptions are gone, becomes a dead letter.
        """
        # The cursor alone is one statement, which needs no transaction.
        with translated(), self._connection.transaction() if failures else nullcontext():
            retried = sum(self._retry_or_give_up(failure) for failure in failures)
            if cursor is not None:
                ask(self._connection, select("pgmb.set_group_cursor", self.name, cursor, False))
        return retried

    def present(self, subscriptions: Collection[str]) -> set[str]:
        """Return those of the subscriptions that still exist."""
        query = "select s.id::text from pgmb.subscriptions as s where s.id = any (%s)"
        return {id for (id,) in rows(self._connection, query, [list(subscriptions)])}

    def go_back(self, cursor: str) -> None:
        """Move the cursor back. A cursor that is before the new position stays, so that no event is skipped."""
        with translated(), self._connection.transaction() as move:
            position = ask(self._connection, select("pgmb.position", self.name))
            self.keep([], cursor)
            if position["cursor"] < cursor:
                raise psycopg.Rollback(move)

    def stay(self) -> None:
        """Keep the group's subscriptions from expiring. Raises ConnectionLost if the lock's connection is lost."""
        heartbeat(self._connection, self.name)

    def _next(self, cursor: str | None, limit: int) -> list[dict[str, Any]]:
        query = sql.SQL(
            "select id, topic, payload, metadata, subscription_ids::text[], next_cursor "
            "from pgmb.read_next_events({}, {}, {}, peek => true)"
        ).format(self.name, cursor, limit)
        return records(self._connection, query)

    def _retry(self, event: Event) -> Retry:
        event = replace(event, subscriptions=_came_by(event))
        payload = event.payload if isinstance(event.payload, Mapping) else {}
        handler, number, ids = payload.get("handlerName"), payload.get("retryNumber"), payload.get("ids")
        if not (
            isinstance(handler, str)
            and isinstance(number, int)
            and 0 <= number < MOST_ATTEMPTS
            and isinstance(ids, list)
            and ids
            and all(isinstance(id, str) for id in ids)
        ):
            return Retry(event, RETRY, problem="its payload has no ids, retryNumber and handlerName")
        events = _copied(event)
        if events is None:
            query = sql.SQL("select * from pgmb.read_events({}::text[]::pgmb.event_id[])").format(
                sql.Literal(ids)
            )
            stored = records(self._connection, query)
            events = tuple(_event({**row, "subscription_ids": event.subscriptions}) for row in stored)
        missing = sorted(set(ids) - {each.id for each in events})
        problem = f"events that are not in the log any more: {', '.join(missing)}" if missing else None
        return Retry(event, handler, number + 1, events, problem)

    def _retry_or_give_up(self, failure: Failure) -> bool:
        """Schedule a retry of the failure's events. Return False if some of them became dead letters instead."""
        portions = [_arguments(failure, events) for events in _portions(failure.events)]
        given_up = [arguments for arguments in portions if not self._retry_later(arguments, failure.pause)]
        for arguments in given_up:
            ask(
                self._connection,
                "select pgmb.give_up_events(%s, %s, %s, %s, %s, %s)",
                [self.name, *arguments],
            )
        return not given_up

    def _retry_later(self, arguments: list[Any], pause: float | None) -> bool:
        query = "select pgmb.retry_events(%s, %s, %s, %s, %s, make_interval(secs => %s))"
        return pause is not None and ask(self._connection, query, [*arguments, pause]) is not None


@contextmanager
def held_group(
    conninfo: str, name: str, busy_timeout: float | None, stopped: Callable[[], bool]
) -> Iterator[Group]:
    """Lock a group on a new connection, and release the lock at the end of the block.

    Waits up to ``busy_timeout`` seconds while another session holds the lock; None: without limit. Raises ConsumerBusy,
    Stopped and ConnectionLost.
    """
    connection = connect(conninfo, primary=True)
    with connection:
        try:
            # The lock belongs to the session. So the server must end the session, and free the lock, if the heartbeat
            # stops.
            keep_open(connection, idle_session_timeout=session_patience(connection))
            _lock(connection, name, busy_timeout, stopped)
            try:
                yield Group(connection, name)
            finally:
                # Release the lock explicitly: after a mere disconnect the server frees it with a delay.
                with suppress(psycopg.OperationalError):
                    connection.execute(select("pgmb.release_group_lock", name))
        except (psycopg.OperationalError, ServerUnavailable) as error:
            if not connection.closed:
                raise
            raise ConnectionLost(
                f"group {name}: the connection that locked it was lost ({str(error).strip()}); events after the stored "
                "cursor come again to the next reader of the group"
            ) from error


def _lock(
    connection: psycopg.Connection[Any], name: str, busy_timeout: float | None, stopped: Callable[[], bool]
) -> None:
    """Take the lock of read_next_events before anything is read."""
    lock = sql.SQL("select pg_catalog.pg_try_advisory_lock({})").format(call("pgmb.lock_key", name))

    def attempt() -> bool:
        if stopped():
            raise Stopped(f"group {name}: stopped before it was held, and nothing was read")
        return bool(ask(connection, lock))

    if not succeeds(attempt, busy_timeout):
        raise ConsumerBusy(f"group {name} is locked by another session: stop that session, or wait for it")


def _came_by(retry: Event) -> tuple[str, ...]:
    """Return the subscriptions through which a retry's events were delivered first.

    The retry itself is delivered through only one of them.
    """
    stored = retry.metadata.get("subscriptions")
    return tuple(map(str, stored)) if isinstance(stored, list) and stored else retry.subscriptions


def _copied(retry: Event) -> tuple[Event, ...] | None:
    """Return the copies of events that a retry contains; None if another program published the retry, without copies."""
    try:
        copies = retry.metadata["events"]
        return tuple(_event({**copy, "subscription_ids": retry.subscriptions}) for copy in copies)
    except (KeyError, TypeError, ValueError):
        return None


def _event(row: Mapping[str, Any]) -> Event:
    return Event(
        row["topic"],
        row["payload"],
        _metadata(row["metadata"]),
        subscription_id=row.get("subscription_id"),
        id=row["id"],
        subscriptions=tuple(row["subscription_ids"]),
    )


def _metadata(stored: Any) -> Mapping[str, Any]:
    """Convert stored metadata to a mapping. Other clients may have stored null or another JSON value."""
    if stored is None:
        return {}
    return stored if isinstance(stored, dict) else {"json": stored}


def _arguments(failure: Failure, events: Sequence[Event]) -> list[Any]:
    """Return the arguments of the SQL functions for failed events.

    They contain copies of the events, because the log may delete events that were read.
    """
    copies = [shown(event) for event in events]
    return [
        list(failure.subscriptions),
        failure.handler,
        Jsonb(copies, text_of),
        failure.error,
        failure.attempt,
    ]


def _portions(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Split events, in order, into portions of about ``PORTION_BYTES``."""
    portion: list[Event] = []
    size = 0
    for event in events:
        more = len(str(event.payload)) + len(str(event.metadata))
        if portion and size + more > PORTION_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(event)
        size += more
    yield portion
