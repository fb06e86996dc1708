"""Short functions to publish, subscribe, dispatch and read events by SQL, for the tests."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.feeds import EventFeed
from tests.batches import taken
from tests.tubes import one

Connection = psycopg.Connection[Any]

TOPICAL = "s.params @> jsonb_build_object('topic', e.topic)"
FEED = EventFeed("g")


def subscribe(
    connection: Connection, group: str = "g", conditions: str = "TRUE", params: Any = None, **columns: Any
) -> str:
    """Create a subscription, and return its id."""
    names = ", ".join(["group_id", "conditions_sql", "params", *columns])
    places = ", ".join(["%s"] * (3 + len(columns)))
    query = f"insert into pgmb.subscriptions ({names}) values ({places}) returning id"
    return str(one(connection, query, group, conditions, Jsonb(params or {}), *columns.values()))


def publish(connection: Connection, *topics: str, payload: Any = None, to: str | None = None) -> list[str]:
    """Publish an event for each topic by one statement, and return the ids."""
    rows = connection.execute(
        "insert into pgmb.events (topic, payload, subscription_id) "
        "select t, %s, %s from unnest(%s::text[]) as t returning id",
        [Jsonb(payload or {}), to, list(topics)],
    )
    return [row[0] for row in rows.fetchall()]


def publish_at(connection: Connection, when: str, topic: str = "t", number: int = 0) -> str:
    """Publish an event whose id has the time of an SQL expression."""
    query = (
        f"insert into pgmb.events (id, topic, payload) values (pgmb.create_event_id({when}, %s), %s, '{{}}') "
        "returning id"
    )
    return str(one(connection, query, number, topic))


def error(connection: Connection, query: Any, *parameters: Any) -> psycopg.DatabaseError:
    """Return the server's answer to a query that it refuses."""
    with pytest.raises(psycopg.DatabaseError) as refused:
        connection.execute(query, parameters)
    return refused.value


def poll(connection: Connection) -> int:
    return int(one(connection, "select pgmb.poll_for_events()"))


def poll_all(connection: Connection) -> int:
    """Dispatch until nothing is left, and return the number of pairs of event and subscription."""
    found = 0
    while pairs := poll(connection):
        found += pairs
    return found


def read(
    connection: Connection, group: str = "g", chunk: int = 1000, cursor: str | None = None, peek: bool = True
) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=psycopg.rows.dict_row) as rows:
        return rows.execute(
            "select id, topic, payload, metadata, subscription_ids::text[], next_cursor "
            "from pgmb.read_next_events(%s, %s, %s, %s)",
            [group, cursor, chunk, peek],
        ).fetchall()


def take(connection: Connection, group: str = "g", chunk: int = 1000) -> list[str]:
    """Read the next chunk, move the cursor behind the chunk, and release the lock. Return the ids."""
    rows = read(connection, group, chunk, peek=False)
    if rows:
        connection.execute("select pgmb.set_group_cursor(%s, %s, true)", [group, rows[-1]["next_cursor"]])
    else:
        connection.execute("select pgmb.release_group_lock(%s)", [group])
    return [row["id"] for row in rows]


def drain(connection: Connection, group: str = "g", chunk: int = 1000) -> list[str]:
    """Dispatch and read until nothing is left, and return the ids in order."""
    found: list[str] = []
    while poll(connection) or read(connection, group, 1):
        while taken := take(connection, group, chunk):
            found += taken
    return found


def position(connection: Connection, group: str = "g") -> dict[str, Any]:
    return one(connection, "select pgmb.position(%s)", group) or {}


def claim(connection: Connection, group: str = "g", limit: int = 1000) -> dict[str, Any] | None:
    at = json.dumps(position(connection, group))
    return one(connection, "select pgmb.claim(%s, %s, %s)", group, at, limit)


def lag(connection: Connection, group: str = "g", upto: int = 1000) -> dict[str, Any]:
    at = json.dumps(position(connection, group))
    return one(connection, "select pgmb.lag(%s, %s, %s)", group, at, upto)


def faults(connection: Connection) -> list[tuple[str, list[str], str]]:
    rows = connection.execute("select subscription_id, event_ids, message from pgmb.fault order by id")
    return [tuple(row) for row in rows]


def work(
    db: str, feed: EventFeed = FEED, limit: int = 1000, source: str | None = None, write: Any = None
) -> list[str]:
    """Process the next batch, and return its ids."""
    return [change.id for change in taken(feed, db, source, limit, write)]


def work_all(db: str, **options: Any) -> list[str]:
    """Process all batches, and return their ids."""
    found = []
    while taken := work(db, **options):
        found += taken
    return found
