"""Sessions that a drain loop keeps from one batch to the next, because planning and compiling anew costs most of a small
batch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from airflow_pgchange.feeds import connections, watched_connection

ANSWERED_WITHIN = 1.0
"""Seconds. A session that has answered more recently, and that the server has not ended since, is used without a ping."""
LIFETIME = 600.0
"""Seconds until a session is replaced. A session's caches grow, and it does not see later defaults of its role."""
RESET = """
    close all;
    unlisten *;
    set session authorization default;
    reset all;
    discard temp;
    discard sequences;
    deallocate all;
    select pg_catalog.pg_advisory_unlock_all();
"""
"""``discard all`` without the plans, which are the reason to keep a session."""


class Sessions:
    """Sessions that are kept until the end of the block.

    The next batch gets a session as a new connection would be: without settings, temporary tables, cursors, listeners,
    locks, or attributes of the Python object. A session is not kept after an error, if a pooler shares it, or if it is
    older than ten minutes.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[tuple[str, bool], list[tuple[float, watched_connection.Connection]]] = (
            defaultdict(list)
        )

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        for _opened_at, connection in chain(*self._idle.values()):
            connection.close()
        self._idle.clear()

    @contextmanager
    def connect(self, conninfo: str, *, primary: bool = False) -> Iterator[psycopg.Connection[Any]]:
        """Yield a connection like that of ``connections.connect``. It is closed for the caller when the block ends."""
        idle = self._idle[conninfo, primary]
        opened_at, connection = self._take_idle(idle) or _opened(conninfo, primary)
        with connection:
            yield connection
            if time.monotonic() < opened_at + LIFETIME and (clean := _cleaned(connection)):
                idle.append((opened_at, clean))

    def _take_idle(
        self, idle: list[tuple[float, watched_connection.Connection]]
    ) -> tuple[float, watched_connection.Connection] | None:
        """Return a kept session that still answers. The server may have ended it meanwhile, as in a failover."""
        while idle:
            opened_at, connection = idle.pop()
            with suppress(psycopg.Error):
                if connection.sock is None or not connection.sock.has_answered(ANSWERED_WITHIN):
                    connection.execute("select 1")
                return opened_at, connection
            connection.close()
        return None


def _opened(conninfo: str, primary: bool) -> tuple[float, watched_connection.Connection]:
    return time.monotonic(), connections.connect(conninfo, primary=primary)


def _cleaned(connection: watched_connection.Connection) -> watched_connection.Connection | None:
    """Return a connection as after ``connections.connect``, on the same session; None if the session cannot be reused."""
    is_own = connection.sock is not None and connection.sock.has_session
    if not is_own or connection.info.transaction_status != TransactionStatus.IDLE:
        return None
    with suppress(psycopg.Error):
        clean = connection.handed_on()
        try:
            connections.configure(clean)
            clean.reset_session(RESET)
            connections.make_readable(clean)
        except BaseException:
            clean.close()
            raise
        return clean
    return None
