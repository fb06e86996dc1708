"""Consumers of any feed, and the states in which a dump or an upgrade can find them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from airflow_pgchange import ConsumerTransaction, admin, detached
from airflow_pgchange.feeds import error_text, to_json, transaction
from airflow_pgchange.feeds.connections import connect

Connection = psycopg.Connection[Any]
LEASE = "6 days"


@contextmanager
def sessions_reused() -> Iterator[None]:
    """Let all consumer transactions share sessions. A new session plans and compiles every function anew."""
    idle: defaultdict[bool, list[Connection]] = defaultdict(list)
    with ExitStack() as opened:

        @contextmanager
        def lend(conninfo: str, *, primary: bool = False) -> Iterator[Connection]:
            connection = (
                idle[primary].pop()
                if idle[primary]
                else opened.enter_context(connect(conninfo, primary=primary))
            )
            yield connection
            connection.execute("reset all")
            idle[primary].append(connection)

        transaction.connect = error_text.connect = lend  # type: ignore[assignment]
        try:
            yield
        finally:
            transaction.connect = error_text.connect = connect


class Failed(Exception):
    """Raised by the processing of a batch that is to be tried again."""


def key_of(change: Any) -> str:
    """Return the text of a change's key: the number n in a message or an event, which a dead letter keeps, or its id."""
    data = getattr(change, "data", None) or {}
    numbered = data.get("data") or data.get("payload") or {}
    return str(numbered.get("n", change.id))


def work(feed: Any, db: str, limit: int = 100) -> int:
    """Process the next batch, record its changes in ``done``, and return their number."""
    with ConsumerTransaction(feed, db) as consumer:
        if consumer.claim(limit) is None:
            return 0
        ids = [key_of(change) for change in consumer.changes()]
        consumer.ack(lambda connection: record(connection, feed.name, ids))
    return len(ids)


def record(connection: Connection, consumer: str, ids: Iterable[str]) -> None:
    connection.execute("insert into done select %s, unnest(%s::text[])", [consumer, list(ids)])


def fail(feed: Any, db: str, limit: int = 2, **options: Any) -> None:
    """Claim a batch, and fail by its content."""
    try:
        with ConsumerTransaction(feed, db) as consumer:
            consumer.claim(limit, **options)
            raise Failed("the content of the batch cannot be parsed")
    except Failed:
        pass


def idle(feed: Any, db: str, connection: Connection) -> None:
    while work(feed, db):
        pass


def partly(feed: Any, db: str, connection: Connection) -> None:
    work(feed, db, 2)


def retried(feed: Any, db: str, connection: Connection) -> None:
    work(feed, db, 1)
    fail(feed, db)
    fail(feed, db)


def split(feed: Any, db: str, connection: Connection) -> None:
    fail(feed, db, 4, max_attempts=1, split=True)
    fail(feed, db, 4, max_attempts=1, split=True)


def letter(feed: Any, db: str, connection: Connection) -> None:
    fail(feed, db)
    admin.skip_batch(connection, connection, feed, "cannot be parsed")


def leased(feed: Any, db: str, connection: Connection) -> str:
    handle = detached.claim(feed, db, lease=LEASE, owner="job 1", limit=2)
    assert handle is not None
    return str(handle)


def registered(feed: Any, db: str, connection: Connection) -> None:
    """Register the consumer, and process nothing."""
    fail(feed, db, 1)


STATES: dict[str, Callable[[Any, str, Connection], str | None]] = {
    "idle": idle,
    "partly": partly,
    "retried": retried,
    "split": split,
    "letter": letter,
    "leased": leased,
    "lent": leased,
    "registered": registered,
}
"""The states of consumers. The test acks the batch of ``leased`` by its handle, and ends the lease of ``lent``."""


def expect(connection: Connection, source: str, ids: Iterable[Any]) -> None:
    connection.execute("insert into expected select %s, unnest(%s::text[])", [source, [str(n) for n in ids]])


def begin(connection: Connection, db: str, feed: Any, source: str, state: str) -> None:
    """Bring a consumer into a state, and record it."""
    handle = STATES[state](feed, db, connection)
    connection.execute(
        "insert into worker values (%s, %s, %s, %s, %s)",
        [Jsonb(to_json(feed)), feed.name, source, state, handle],
    )


def returned(connection: Connection, query: str, *parameters: Any) -> list[Any]:
    """Return the first column of all rows, or the tuples of rows with several columns."""
    rows = connection.execute(query, parameters or None).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]
