"""A group that is held: what its holder reads from it and writes for it, on one connection."""

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
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.guarded import session_patience
from airflow_pgchange.feeds.queries import ask, call, records, rows, select
from airflow_pgchange.feeds.retrying import succeeds

PORTION_BYTES = 8 * 2**20
"""About how many bytes of events one retry or dead letter carries at most; more go in several."""
MOST_ATTEMPTS = 1_000_000
"""A retry with a higher count was not written by us."""


@dataclass(frozen=True)
class Retry:
    """Events that come back to one handler, by ``event``, whose ``subscriptions`` are all by which they came at first.
    ``problem`` is why some cannot."""

    event: Event
    handler: str
    attempt: int = 1
    events: tuple[Event, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Read:
    """A batch of a group, and the cursor behind it."""

    events: tuple[Event, ...]
    retries: tuple[Retry, ...]
    cursor: str

    @property
    def count(self) -> int:
        return len(self.events) + len(self.retries)


@dataclass(frozen=True)
class Failure:
    """Events on which a handler failed, and the number of that attempt; ``pause`` is the seconds until the next attempt,
    None if there is none. ``subscriptions`` are those by which the events come to the handler."""

    handler: str
    subscriptions: tuple[str, ...]
    attempt: int
    events: tuple[Event, ...]
    error: str
    pause: float | None


class Group:
    """Reads a group under the lock that its connection holds, and writes what is to be kept. ``more``: what was
    dispatched for it last is not all that waits, so there may be something for this group, too."""

    def __init__(self, connection: psycopg.Connection[Any], name: str) -> None:
        self.name = name
        self.more = False
        self._connection = connection

    def read(self, cursor: str | None, limit: int) -> Read | None:
        """The next batch behind a cursor, or behind the stored one; where nothing is ready a chunk is dispatched. None if
        there is none. Raises UnknownConsumer, DispatchEnded."""
        found = self._next(cursor, limit)
        if not found:
            done = dispatch(self._connection)
            self.more = done.more
            found = self._next(cursor, limit) if done.pairs else []
        if not found:
            return None
        events = [_event(row) for row in found]
        return Read(
            events=tuple(event for event in events if event.topic != RETRY),
            retries=tuple(self._retry(event) for event in events if event.topic == RETRY),
            cursor=found[-1]["next_cursor"],
        )

    def keep(self, failures: Sequence[Failure], cursor: str | None) -> int:
        """Schedule the failures' next attempts, write the dead letters of those that have none or whose subscriptions are
        gone, and move the cursor: all or none. How many come again."""
        # The cursor alone is one statement, which is all or none by itself.
        with translated(), self._connection.transaction() if failures else nullcontext():
            again = sum(self._comes_again(failure) for failure in failures)
            if cursor is not None:
                ask(self._connection, select("pgmb.set_group_cursor", self.name, cursor, False))
        return again

    def present(self, subscriptions: Collection[str]) -> set[str]:
        """Those of some subscriptions that are not ended."""
        query = "select s.id::text from pgmb.subscriptions as s where s.id = any (%s)"
        return {one for (one,) in rows(self._connection, query, [list(subscriptions)])}

    def go_back(self, cursor: str) -> None:
        """Move the cursor back; where it has not come so far it stays, and nothing is left out."""
        with translated(), self._connection.transaction() as move:
            position = ask(self._connection, select("pgmb.position", self.name))
            self.keep([], cursor)
            if position["cursor"] < cursor:
                raise psycopg.Rollback(move)

    def stay(self) -> None:
        """Say that the group is in use; raises ConnectionLost where it is not held any more."""
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
            and all(isinstance(one, str) for one in ids)
        ):
            return Retry(event, RETRY, problem="its payload has no ids, retryNumber and handlerName")
        events = _copied(event)
        if events is None:
            query = sql.SQL("select * from pgmb.read_events({}::text[]::pgmb.event_id[])").format(
                sql.Literal(ids)
            )
            found = records(self._connection, query)
            events = tuple(_event({**row, "subscription_ids": event.subscriptions}) for row in found)
        missing = sorted(set(ids) - {one.id for one in events})
        problem = f"events that are not in the log any more: {', '.join(missing)}" if missing else None
        return Retry(event, handler, number + 1, events, problem)

    def _comes_again(self, failure: Failure) -> bool:
        """Whether a failure's events come again, all of them: what does not is a dead letter."""
        portions = [_told(failure, events) for events in _portions(failure.events)]
        given_up = [told for told in portions if not self._retry_later(told, failure.pause)]
        for told in given_up:
            ask(self._connection, "select pgmb.give_up_events(%s, %s, %s, %s, %s, %s)", [self.name, *told])
        return not given_up

    def _retry_later(self, told: list[Any], pause: float | None) -> bool:
        query = "select pgmb.retry_events(%s, %s, %s, %s, %s, make_interval(secs => %s))"
        return pause is not None and ask(self._connection, query, [*told, pause]) is not None


@contextmanager
def held_group(
    conninfo: str, name: str, busy_timeout: float | None, stopped: Callable[[], bool]
) -> Iterator[Group]:
    """A group whose lock is held, on a connection of its own, and released at the end.

    Waits for another holder up to ``busy_timeout`` seconds. Raises ConsumerBusy, Stopped and ConnectionLost.
    """
    connection = connect(conninfo, primary=True)
    with connection:
        try:
            # The lock is the session's: the server ends a session whose heartbeat stops.
            keep_open(connection, idle_session_timeout=session_patience(connection))
            _lock(connection, name, busy_timeout, stopped)
            try:
                yield Group(connection, name)
            finally:
                # A server that is only left lets go of it some time later.
                with suppress(psycopg.OperationalError):
                    connection.execute(select("pgmb.release_group_lock", name))
        except (psycopg.OperationalError, ServerUnavailable) as error:
            if not connection.closed:
                raise
            raise ConnectionLost(
                f"group {name}: the connection that held it ended ({str(error).strip()}); what was not stored "
                "comes again to whoever reads the group next"
            ) from error


def _lock(
    connection: psycopg.Connection[Any], name: str, busy_timeout: float | None, stopped: Callable[[], bool]
) -> None:
    """Take the lock that read_next_events takes, before anything is read."""
    lock = sql.SQL("select pg_catalog.pg_try_advisory_lock({})").format(call("pgmb.lock_key", name))

    def attempt() -> bool:
        if stopped():
            raise Stopped(f"group {name}: stopped before it was held, and nothing was read")
        return bool(ask(connection, lock))

    if not succeeds(attempt, busy_timeout):
        raise ConsumerBusy(f"group {name} is held by somebody else: stop that, or wait for it")


def _came_by(retry: Event) -> tuple[str, ...]:
    """The subscriptions by which a retry's events came at first: it came itself by the one of them that was there."""
    known = retry.metadata.get("subscriptions")
    return tuple(map(str, known)) if isinstance(known, list) and known else retry.subscriptions


def _copied(retry: Event) -> tuple[Event, ...] | None:
    """The events that a retry of ours carries with it; None for one that somebody else has published."""
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
    """Some clients publish an event without any."""
    if stored is None:
        return {}
    return stored if isinstance(stored, dict) else {"json": stored}


def _told(failure: Failure, events: Sequence[Event]) -> list[Any]:
    """What the database is told of events that failed, with copies, as the log lets go of what was read."""
    copies = [shown(event) for event in events]
    return [
        list(failure.subscriptions),
        failure.handler,
        Jsonb(copies, text_of),
        failure.error,
        failure.attempt,
    ]


def _portions(events: Sequence[Event]) -> Iterator[list[Event]]:
    """The events in order, in portions of bearable size."""
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
