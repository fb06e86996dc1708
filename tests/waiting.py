"""Queries about the lock waits and the held locks of a database, for tests of several sessions."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import psycopg

Connection = psycopg.Connection[Any]
Session = Connection | int
"""A session: its connection, or the id of its server process."""


class Lock(NamedTuple):
    """A held lock, as in the view pg_locks."""

    pid: int
    kind: str
    mode: str


def until(connection: Connection, condition: str, patience: float = 30) -> None:
    """Wait until a query returns true."""
    deadline = time.monotonic() + patience
    while connection.execute(condition).fetchone() != (True,):
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def pause_after(connection: Connection, change: str) -> None:
    """Create a trigger by which a transaction waits for advisory lock 1 after a change, such as ``update on item``."""
    connection.execute(
        "create function public.pause() returns trigger language plpgsql as "
        "'begin perform pg_advisory_xact_lock(1); return null; end'; "
        f"create trigger pause after {change} for each row execute function public.pause()"
    )


def waits(
    session: Session | None = None,
    kind: str | None = None,
    *,
    relation: str | None = None,
    key: str | None = None,
    behind: Session | None = None,
    seconds: float = 0,
) -> str:
    """Return a query that tells whether a session, or any session of this database, waits for a lock.

    ``kind`` is the type of the lock in pg_locks, ``relation`` the name of a table, and ``key`` SQL for the key of an
    advisory lock. ``behind`` is the blocking session, and ``seconds`` the minimum time of the wait. Run the query
    outside of a transaction: within a transaction the list of sessions does not change.
    """
    which = ["a.datname = current_database()", "not l.granted"]
    if session is not None:
        which.append(f"l.pid = {_pid(session)}")
    if kind is not None:
        which.append(f"l.locktype = '{kind}'")
    if relation is not None:
        which.append(f"l.relation = '{relation}'::regclass")
    if key is not None:
        which.append(f"l.locktype = 'advisory' and (l.classid::bigint << 32 | l.objid::bigint) = {key}")
    if behind is not None:
        which.append(f"{_pid(behind)} = any (pg_blocking_pids(l.pid))")
    if seconds:
        which.append(f"l.waitstart < clock_timestamp() - interval '{seconds} seconds'")
    return _exists("pg_locks as l join pg_stat_activity as a using (pid)", which)


def sleeps(query: str = "") -> str:
    """Return a query that tells whether a session of this database is in pg_sleep.

    ``query`` is a pattern of its statement.
    """
    which = ["datname = current_database()", "wait_event = 'PgSleep'", f"query ~ '{query}'"]
    return _exists("pg_stat_activity", which)


def locks(
    connection: Connection, session: Session | None = None, application: str | None = None
) -> list[Lock]:
    """Return the locks of a session or of an application. If neither is given, return all locks in this database."""
    rows = connection.execute(
        "select pid, locktype, mode from pg_locks join pg_stat_activity using (pid) "
        "where granted and datname = current_database() and coalesce(pid = %s, true) "
        "and coalesce(application_name = %s, true)",
        [None if session is None else _pid(session), application],
    )
    return [Lock(*row) for row in rows.fetchall()]


def _exists(what: str, which: list[str]) -> str:
    return f"select exists (select from {what} where {' and '.join(which)})"


def _pid(session: Session) -> int:
    return session if isinstance(session, int) else session.info.backend_pid
