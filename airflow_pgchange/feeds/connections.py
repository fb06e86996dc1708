"""Connections as feeds need them: dead servers noticed, nothing prepared (poolers), nothing left in session state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
from psycopg import IsolationLevel, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import set_json_loads

from airflow_pgchange.feeds import guarded, silence
from airflow_pgchange.feeds.errors import translated

DEFAULTS: dict[str, Any] = {
    "keepalives": 1,
    "client_encoding": "UTF8",
    "fallback_application_name": "airflow_pgchange",
}
CANCEL_WITHIN = 5.0
"""Seconds."""
READABLE = "set datestyle = 'ISO'"
"""The driver reads times in no other style. A pooler keeps it with its client, as the server reports it."""
LASTING = {"idle_session_timeout": "0", "default_transaction_isolation": "read committed"}
"""For a session that is ours as long as it is open."""


def complete(conninfo: str, *, primary: bool = False) -> str:
    """``conninfo`` with our defaults where it says nothing; ``primary`` asks libpq for a server that takes writes.

    ``tcp_user_timeout``, in milliseconds, is how long a server may give no sign of life; the keepalives follow from it.
    """
    given = {key: value for key, value in conninfo_to_dict(conninfo).items() if value is not None}
    wanted = {"target_session_attrs": "read-write"} if primary else {}
    return make_conninfo("", **{**DEFAULTS, **silence.options(given), **given, **wanted})


def connect(conninfo: str, *, primary: bool = False) -> psycopg.Connection[Any]:
    """A connection in autocommit whose statements are sent whole, without parameters or prepared statements.

    The extended protocol would keep a snapshot in a transaction that waits, and prepared statements break behind a
    pooler in transaction mode. A server that gives no sign of life ends the connection (``heartbeat.py``). Raises
    ServerUnavailable.
    """
    with translated():
        connection = guarded.Connection.connect(
            silence.for_libpq(complete(conninfo, primary=primary)),
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.ClientCursor,
        )
        set_json_loads(_loads, connection)
        try:
            connection.guard(complete(conninfo))
            if not _is_readable(connection.info):
                connection.execute(READABLE)
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def both(
    results: str, source: str | None, *, primary: bool = True
) -> Iterator[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    """Connections to the database of the results and to that of the changes: the same where no other is named.
    ``primary`` asks for the source's; the one of the results takes writes in any case."""
    with ExitStack() as opened:
        here = opened.enter_context(connect(results, primary=True))
        yield here, here if source is None else opened.enter_context(connect(source, primary=primary))


def keep_open(connection: psycopg.Connection[Any], **settings: str) -> None:
    """Let the session be idle as long as its work elsewhere takes, let each statement see what others have committed,
    and set what else is given. Behind a pooler it is not ours: nothing is set."""
    with translated():
        connection.execute(lasting(connection.info, **settings))


@contextmanager
def kept_open(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """``keep_open`` for a connection that the caller has opened: until the block ends it is watched, as the connections
    of ``connect`` always are."""
    with guarded.adopted(connection):
        keep_open(connection)
        yield


def lasting(session: psycopg.ConnectionInfo, **settings: str) -> sql.Composed:
    """What ``keep_open`` executes, for the event loop too."""
    each = [
        sql.SQL("pg_catalog.set_config({}, {}, false)").format(name, value)
        for name, value in {**LASTING, **settings}.items()
    ]
    query = sql.SQL("select {} where pg_catalog.pg_backend_pid() = {}")
    return query.format(sql.SQL(", ").join(each), session.backend_pid)


@contextmanager
def read_committed(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction in which each statement sees what others have committed, whatever the role's default is."""
    with connection.transaction():
        connection.execute("set transaction isolation level read committed")
        yield


@contextmanager
def read_only(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction in which nothing is written."""
    with connection.transaction():
        connection.execute("set transaction read only")
        yield


@contextmanager
def begun(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction that may take as long as a batch does, and that sees what others commit meanwhile.

    The server ends it when the heartbeat of this process stops, and not before.
    """
    settings = {guarded.IDLE: guarded.server_patience(connection), "statement_timeout": "0"}
    if connection.info.server_version >= 170000:
        settings["transaction_timeout"] = "0"
    set_local = sql.SQL("set local {} = {}")
    each = [set_local.format(sql.Identifier(setting), value) for setting, value in settings.items()]
    connection.isolation_level = IsolationLevel.READ_COMMITTED
    with connection.transaction():
        connection.execute(sql.SQL("; ").join(each))
        yield


async def connect_async(conninfo: str, *, primary: bool = False) -> psycopg.AsyncConnection[Any]:
    """What ``connect`` returns, for the event loop. Raises ServerUnavailable."""
    with translated():
        connection = await guarded.AsyncConnection.connect(
            silence.for_libpq(complete(conninfo, primary=primary)),
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.AsyncClientCursor,
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
    """JSON whose numbers may be larger than Python reads: in PostgreSQL 1e5000 is one. They are infinite, as every number
    beyond a float is that is not whole. What is nested deeper than Python reads, some 900 levels, stays a text."""
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
    """End the statement that runs on a connection; from another thread, or from a signal's handler."""
    if guarded.is_at_work(connection):
        connection.cancel_safe(timeout=CANCEL_WITHIN)
