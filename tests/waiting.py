"""The lock waits and the held locks in a database, for tests of several sessions."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import psycopg

Connection = psycopg.Connection[Any]
Session = Connection | int
"""A session: its connection, or the id of its server process."""


class Lock(NamedTuple):
    """A lock that is held, as pg_locks has it."""

    pid: int
    kind: str
    mode: str


def until(connection: Connection, condition: str, patience: float = 30) -> None:
    """Return once a query says true."""
    deadline = time.monotonic() + patience
    while connection.execute(condition).fetchone() != (True,):
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def pause_after(connection: Connection, change: str) -> None:
    """Let each transaction wait for advisory lock 1 after a change of a row, such as ``update on item``."""
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
    """A query whether a session waits for a lock; where none is named, whether any of this database does.

    ``kind`` is the type of the lock in pg_locks, ``relation`` the name of a table, and ``key`` SQL for the key of an
    advisory lock. ``behind`` is the blocking session, and ``seconds`` the minimum time of the wait. Ask outside of a
    transaction: within a transaction the list of sessions does not change.
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
    """A query whether a session of this database is in pg_sleep, by a query that matches a pattern."""
    which = ["datname = current_database()", "wait_event = 'PgSleep'", f"query ~ '{query}'"]
    return _exists("pg_stat_activity", which)


def locks(
    connection: Connection, session: Session | None = None, application: str | None = None
) -> list[Lock]:
    """The locks that a session holds, or those of an application; where neither is named, all of this database."""
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
