"""Connections for feeds. They detect dead servers, prepare no statements, and keep no session state behind a pooler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
from psycopg import IsolationLevel, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import set_json_loads

from airflow_pgchange.feeds import server_timeout, tokens, watched_connection
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.refused_statements import AsyncCursor, Cursor

DEFAULTS: dict[str, Any] = {
    "keepalives": 1,
    "client_encoding": "UTF8",
    "fallback_application_name": "airflow_pgchange",
}
CANCEL_WITHIN = 5.0
"""Seconds for the request to cancel a statement."""
READABLE = "set datestyle = 'ISO'"
"""psycopg can read times in this style only. A pooler keeps the setting for its client, because the server reports it."""
LASTING = {"idle_session_timeout": "0", "default_transaction_isolation": "read committed"}
"""Settings for a session that no pooler shares with others."""


def complete(conninfo: str, *, primary: bool = False) -> str:
    """Add our defaults to ``conninfo``. ``primary`` makes libpq choose a server that accepts writes.

    The option ``tcp_user_timeout``, in milliseconds, is the time for which a server may give no sign of life. The
    keepalive settings are derived from it.
    """
    explicit = {key: value for key, value in conninfo_to_dict(conninfo).items() if value is not None}
    server_kind = {"target_session_attrs": "read-write"} if primary else {}
    return make_conninfo("", **{**DEFAULTS, **server_timeout.options(explicit), **explicit, **server_kind})


def connect(conninfo: str, *, primary: bool = False) -> watched_connection.Connection:
    """Open a connection in autocommit mode that sends statements as text, without parameters or prepared statements.

    The extended protocol would keep a snapshot while a transaction waits, and prepared statements fail behind a pooler in
    transaction mode. If the server gives no sign of life, the connection is closed (``heartbeat.py``). Raises
    ServerUnavailable.
    """
    conninfo = tokens.renewed(conninfo)
    with translated():
        connection = watched_connection.Connection.connect(
            server_timeout.for_libpq(complete(conninfo, primary=primary))
        )
        try:
            configure(connection)
            connection.guard(complete(conninfo))
            make_readable(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def configure(connection: psycopg.Connection[Any]) -> None:
    """Set the attributes of the Python object that all connections have."""
    connection.autocommit = True
    connection.prepare_threshold = None
    connection.cursor_factory = Cursor
    set_json_loads(_loads, connection)


def make_readable(connection: psycopg.Connection[Any]) -> None:
    if not _is_readable(connection.info):
        connection.execute(READABLE)


@contextmanager
def both(
    results: str, source: str | None, *, primary: bool = True
) -> Iterator[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    """Yield connections to the results and to the source; the same connection twice if ``source`` is None.

    ``primary`` asks for the primary of the source. The results are always on their primary.
    """
    with ExitStack() as opened:
        here = opened.enter_context(connect(results, primary=True))
        yield here, here if source is None else opened.enter_context(connect(source, primary=primary))


def keep_open(connection: psycopg.Connection[Any], **settings: str) -> None:
    """Allow the session to be idle for any time, let each statement see what others have committed, and apply
    ``settings``.

    Behind a pooler nothing is set, because the session is shared.
    """
    with translated():
        connection.execute(lasting(connection.info, **settings))


@contextmanager
def kept_open(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Apply ``keep_open`` to a connection that the caller has opened, and watch it until the block ends, as the
    connections of ``connect`` always are."""
    with watched_connection.adopted(connection):
        keep_open(connection)
        yield


def lasting(session: psycopg.ConnectionInfo, **settings: str) -> sql.Composed:
    """Return the query of ``keep_open``, for use in an event loop."""
    each = [
        sql.SQL("pg_catalog.set_config({}, {}, false)").format(name, value)
        for name, value in {**LASTING, **settings}.items()
    ]
    query = sql.SQL("select {} where pg_catalog.pg_backend_pid() = {}")
    return query.format(sql.SQL(", ").join(each), session.backend_pid)


@contextmanager
def read_committed(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Open a READ COMMITTED transaction, whatever the role's default is."""
    with connection.transaction():
        connection.execute("set transaction isolation level read committed")
        yield


@contextmanager
def read_only(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Open a READ ONLY transaction."""
    with connection.transaction():
        connection.execute("set transaction read only")
        yield


@contextmanager
def begun(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Open a READ COMMITTED transaction that may last as long as a batch.

    The server ends it only if the heartbeat of this process stops.
    """
    settings = {
        watched_connection.IDLE: watched_connection.server_patience(connection),
        "statement_timeout": "0",
    }
    if connection.info.server_version >= 170000:
        settings["transaction_timeout"] = "0"
    set_local = sql.SQL("set local {} = {}")
    each = [set_local.format(sql.Identifier(setting), value) for setting, value in settings.items()]
    connection.isolation_level = IsolationLevel.READ_COMMITTED
    with connection.transaction():
        connection.execute(sql.SQL("; ").join(each))
        yield


async def connect_async(conninfo: str, *, primary: bool = False) -> psycopg.AsyncConnection[Any]:
    """Open a connection like that of ``connect``, for an event loop. Raises ServerUnavailable."""
    with translated():
        connection = await watched_connection.AsyncConnection.connect(
            server_timeout.for_libpq(complete(conninfo, primary=primary)),
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=AsyncCursor,
        )
        set_json_loads(_loads, connection)
        try:
            await connection.guard(complete(conninfo))
            if not _is_readable(connection.info):
                await connection.execute(READABLE)
        except BaseException:
            await connection.close()
            raise
        return connection


def _loads(text: str | bytes) -> Any:
    """Parse JSON from PostgreSQL, which accepts larger numbers and deeper nesting than Python.

    A whole number with more digits than Python parses becomes infinite, like every number beyond the range of a float.
    JSON that is nested too deeply for Python, at some 900 levels, or 9,000 from 3.13 on, is returned as text.
    """
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        return text if isinstance(text, str) else text.decode()


def _whole(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _is_readable(info: psycopg.ConnectionInfo) -> bool:
    return (info.parameter_status("DateStyle") or "").startswith("ISO")


def cancel(connection: psycopg.Connection[Any]) -> None:
    """Cancel the statement that runs on a connection. Can be called from another thread or a signal handler."""
    if watched_connection.is_at_work(connection):
        connection.cancel_safe(timeout=CANCEL_WITHIN)
