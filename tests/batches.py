"""Process a batch of any feed as a consumer does, for the tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from airflow_pgchange.feeds import Change, ConsumerTransaction, error_text, transaction
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.feed import Feed

Connection = psycopg.Connection[Any]


class _Pool:
    """A pool of open connections. ``_idle`` are those that no transaction uses."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._idle: defaultdict[tuple[str, bool], list[Connection]] = defaultdict(list)

    @contextmanager
    def lend(self, conninfo: str, primary: bool) -> Iterator[Connection]:
        idle, connection = self._idle[conninfo, primary], None
        while idle and connection is None:
            connection = _reset(idle.pop())
        if connection is None:
            connection = self._opened.enter_context(connect(conninfo, primary=primary))
        try:
            yield connection
        finally:
            if not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE:
                idle.append(connection)


def _reset(connection: Connection) -> Connection | None:
    """Reset the settings of the previous transaction on a connection.

    Return None if the server has closed the connection.
    """
    try:
        connection.execute("reset all")
    except psycopg.OperationalError:
        return None
    return connection


_POOL: ContextVar[_Pool | None] = ContextVar("pool", default=None)


def _connect(conninfo: str, *, primary: bool = False) -> AbstractContextManager[Connection]:
    pool = _POOL.get()
    return connect(conninfo, primary=primary) if pool is None else pool.lend(conninfo, primary)


transaction.connect = _connect  # type: ignore[assignment]
error_text.connect = _connect  # type: ignore[assignment]


@contextmanager
def connections_reused() -> Iterator[None]:
    """Let the consumer transactions of this thread reuse connections.

    In a new session PostgreSQL compiles and plans each function anew, which costs more than a small batch does.
    """
    with ExitStack() as opened:
        token = _POOL.set(_Pool(opened))
        try:
            yield
        finally:
            _POOL.reset(token)


def taken(
    feed: Feed, results: str, source: str | None = None, limit: int = 1000, write: Any = None
) -> list[Change]:
    """Claim the next batch, call ``write``, ack, and return the batch's changes.

    Return an empty list if nothing is ready.
    """
    with ConsumerTransaction(feed, results, source) as consumer:
        if consumer.claim(limit) is None:
            return []
        changes = list(consumer.changes())
        consumer.ack(write)
    return changes


def drained(feed: Feed, results: str, source: str | None = None, limit: int = 1000) -> list[Change]:
    """Process and ack all batches that are ready, and return their changes."""
    found: list[Change] = []
    with connections_reused():
        while changes := taken(feed, results, source, limit):
            found += changes
    return found
