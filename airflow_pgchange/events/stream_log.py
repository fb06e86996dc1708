"""The database queries of event streams, on one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable
from airflow_pgchange.events.event import MICROSECOND, id_of_microsecond
from airflow_pgchange.events.stream import StreamPosition
from airflow_pgchange.events.subscriptions import Selection, subscribing
from airflow_pgchange.feeds.connections import connect_async, lasting
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.event_log import EPOCH
from airflow_pgchange.feeds.watched_connection import server_patience

ANSWER_WITHIN = 30.0
"""Timeout of a query in seconds; after it the database counts as unavailable."""
SLICES = 4
"""Number of slices of dispatched events in one query. A slice has at most 280 events."""
CLOCK = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint"
# PostgreSQL builds the JSON for clients, so this process does not parse events.
SHOWN = "jsonb_build_object('id', x.id, 'topic', x.topic, 'payload', x.payload, 'metadata', x.metadata)::text as data"
LIVE = f"""
    select d.id::text, i.id, array_agg(d.subscription_id::text)
    from (
        select * from pgmb.dispatched where group_id = %s and id > %s
        order by id fetch first {SLICES} rows with ties
    ) as d cross join lateral unnest(d.event_ids) as i(id)
    group by 1, 2 order by d.id::text collate "C", i.id collate "C"
"""
BETWEEN = """
    from pgmb.dispatched as d cross join lateral unnest(d.event_ids) as i(id)
    where d.group_id = %s and d.subscription_id = %s and d.id >= %s and d.id <= %s
      and (d.id, i.id collate "C") > (%s, %s)
"""
MISSED = f'select d.id::text, i.id {BETWEEN} order by d.id, i.id collate "C" limit %s'
# Pass ids as constants, so that the planner prunes partitions. Else it plans all of them, and JIT compiles a plan of
# hundreds of partitions in each query.
EVENTS = f"select x.id::text, {SHOWN} from pgmb.events as x where x.id = any (%s::text[])"
COUNTED = f"""
    select {CLOCK}, (select count(*) from (select {BETWEEN} limit %s) as m),
           %s <= coalesce((select max(id) from pgmb.dispatched where group_id = %s), '')
"""
# If the clock was set back, the cursor may be ahead of it. New events still come after the cursor, so take the greater.
STARTED = f"""
    select exists (select from pgmb.subscriptions where group_id = %s and expiry_interval is null),
           coalesce((select max(id) from pgmb.dispatched where group_id = %s), ''),
           greatest({CLOCK}, pgmb.micros(nullif(pgmb.position(%s) ->> 'cursor', '')) + 1)
"""
PASSED = "select pgmb.position(%s) ->> 'cursor' > %s collate \"C\""
LOCKED = "select pg_catalog.pg_try_advisory_xact_lock(pgmb.lock_key(%s))"
# Move the cursor only forward, because another process may have trimmed older events. Never move it beyond the clock,
# in case the clock was set back.
MOVED = f"""
    select pgmb.set_group_cursor(%s, %s) where pgmb.position(%s) ->> 'cursor' < %s collate "C" and %s <= {CLOCK}
"""
KEPT = "select s.id::text from pgmb.subscriptions as s where s.id = any (%s)"


class StreamLog:
    """Reads the events that were dispatched to a group, without the group's lock. Not for concurrent queries."""

    def __init__(self, conninfo: str, group: str) -> None:
        self._conninfo = conninfo
        self._group = group
        self._connection: psycopg.AsyncConnection[Any] | None = None

    @property
    def lost(self) -> bool:
        return self._connection is None or self._connection.closed

    async def connect(self) -> None:
        self._connection = await connect_async(self._conninfo, primary=True)
        # Transactions here never pause. So the server may end a session that is idle in a transaction: its client is
        # gone.
        patience = server_patience(self._connection)
        await self._rows(lasting(self._connection.info, idle_in_transaction_session_timeout=patience))

    async def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()

    async def end(self) -> StreamPosition:
        """Return the position after all dispatched events. Raises InvalidArgument if the group has other readers."""
        [(taken, at, now)] = await self._rows(STARTED, [self._group] * 3)
        if taken:
            raise InvalidArgument(
                f"group {self._group} has subscriptions of another reader, which would lose events: give streams a "
                "group of their own"
            )
        return StreamPosition(at, seen=now)

    async def subscribe(self, selection: Selection, expiry: timedelta) -> tuple[str, int]:
        """Subscribe. Return the subscription's id and its creation time in microseconds of the server's clock."""
        query, values = subscribing(self._group, replace(selection, expiry=expiry))
        [(subscription_id, since)] = await self._rows(query, values)
        return str(subscription_id), (since - EPOCH) // MICROSECOND

    async def live(self, after: StreamPosition) -> list[tuple[StreamPosition, list[str], str | None]]:
        """Return the events of the next slices: position, subscriptions, and data. A deleted event has the data None."""
        rows = await self._rows(LIVE, [self._group, after.slice])
        shown = await self._shown([event for _, event, _ in rows])
        return [
            (StreamPosition(at, event, _time(at)), subscriptions, shown.get(event))
            for at, event, subscriptions in rows
        ]

    async def dispatch(self) -> tuple[int, int]:
        """Dispatch a chunk. Return the server's clock in microseconds, and the number of dispatched events."""
        [(now, dispatched)] = await self._rows(f"select {CLOCK}, pgmb.poll_for_events()")
        return now, dispatched

    async def missed(
        self, subscription_id: str, last: StreamPosition, upto: StreamPosition, most: int
    ) -> list[tuple[StreamPosition, str | None]]:
        """Return the next events of a subscription between two positions, fewer than ``most`` only if there are no more.

        The data of a deleted event is None.
        """
        rows = await self._rows(MISSED, [*self._between(subscription_id, last, upto), most])
        shown = await self._shown([event for _, event in rows])
        positions = [StreamPosition(at, event, _time(at)) for at, event in rows]
        # Give the later ``seen`` only to the position of the last event. A client that leaves at an earlier event has
        # not received the newer events.
        if positions and len(positions) < most:
            positions[-1] = replace(positions[-1], seen=upto.seen)
        return [(position, shown.get(position.event)) for position in positions]

    async def count(
        self, subscription_id: str, last: StreamPosition, upto: StreamPosition, most: int
    ) -> tuple[int, int, bool]:
        """Count the events of a subscription between two positions, up to ``most``.

        Returns the server's clock in microseconds, the count, and whether the group has ever reached ``last``.
        """
        values = [*self._between(subscription_id, last, upto), most, last.slice, self._group]
        [(now, count, reached)] = await self._rows(COUNTED, values)
        return now, count, reached or last.slice <= upto.slice

    async def passed(self, position: StreamPosition) -> bool:
        """Return whether events after a position may be gone, because another process of the group trimmed them."""
        seen = id_of_microsecond(position.seen, 0)
        [(passed,)] = await self._rows(PASSED, [self._group, seen])
        return bool(passed)

    async def keep(
        self, subscription_ids: Sequence[str], position: StreamPosition, age: timedelta
    ) -> set[str]:
        """Keep subscriptions from expiring, and allow trimming of events older than ``age``.

        Returns the subscriptions that still exist.
        """
        ids = list(subscription_ids)
        await self._rows("select pgmb.keep_alive(%s, %s)", [self._group, ids])
        kept_ids = await self._rows(KEPT, [ids])
        await self._let_go(position.seen - age // MICROSECOND)
        return {subscription_id for (subscription_id,) in kept_ids}

    async def _let_go(self, since: int) -> None:
        """Move the group's cursor up to a time, so that older events can be trimmed.

        Does nothing while another process does the same.
        """
        if self._connection is None:
            return
        oldest = id_of_microsecond(max(since, 0), 0)
        async with self._connection.transaction():
            # Lock in a separate statement, so that the next statement reads the cursor after the lock is held.
            [(ours,)] = await self._rows(LOCKED, [self._group])
            if ours:
                await self._rows(MOVED, [self._group, oldest, self._group, oldest, since])

    async def _shown(self, event_ids: list[str]) -> dict[str, str]:
        """Return the JSON text of events by their ids."""
        return dict(await self._rows(EVENTS, [event_ids])) if event_ids else {}

    def _between(self, subscription_id: str, last: StreamPosition, upto: StreamPosition) -> list[Any]:
        return [self._group, subscription_id, last.slice, upto.slice, last.slice, last.event]

    async def _rows(self, query: str | sql.Composed, values: Sequence[Any] = ()) -> list[Any]:
        if self._connection is None:
            raise ServerUnavailable("the database cannot be reached now: try again later")
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                with translated():
                    cursor = await self._connection.execute(query, values)
                    return await cursor.fetchall()
        except TimeoutError as error:
            await self.disconnect()
            raise ServerUnavailable(f"the database did not answer within {ANSWER_WITHIN:g} s") from error


def _time(cursor: str) -> int:
    """Return the time in an id, in microseconds."""
    return int(cursor[2:15], 16)
