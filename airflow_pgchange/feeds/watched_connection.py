"""Connections of psycopg that are watched while they wait for the server. Synchronous connections are also watched at
rest."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any, LiteralString
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import PGconn, TransactionStatus
from psycopg.rows import tuple_row

from airflow_pgchange.feeds import heartbeat, server_timeout
from airflow_pgchange.feeds.liveness import SESSION
from airflow_pgchange.feeds.watched_socket import Deadlines, WatchedSocket

CHECK = "client_connection_check_interval"
"""PostgreSQL refuses this setting on systems that cannot detect the end of a connection while a statement runs."""
IDLE = "idle_in_transaction_session_timeout"
LESSER = """
    case when pg_catalog.current_setting({name})::interval > interval '0'
          and pg_catalog.current_setting({name})::interval < {value}::interval
         then pg_catalog.current_setting({name}) else {value} end
"""
"""The shorter of our timeout and the timeout that the owner of the database has set."""
OPENED = f"extract(epoch from pg_catalog.clock_timestamp())::float8, {SESSION}"
"""The columns that identify the session of a socket."""
REFUSED = (psycopg.errors.InvalidParameterValue, psycopg.errors.InsufficientPrivilege)
"""The right to call a function of the query may have been revoked. Then the session stays unknown, as behind a pooler."""
CLOSED = b"closed"
"""Not a connection string: libpq returns a connection that is closed."""
HANDED_ON_WITHIN = 1.0
"""Seconds. A heartbeat holds the lock of an idle connection for the time of its answer."""
HEARTBEAT_NAME = "airflow_pgchange heartbeat"
ADOPTED: WeakKeyDictionary[psycopg.Connection[Any], WatchedSocket] = WeakKeyDictionary()


class Connection(psycopg.Connection[Any]):
    """A connection that ends with OperationalError if the server gives no sign of life. Heartbeats are sent on it."""

    sock: WatchedSocket | None = None

    def guard(self, conninfo: str) -> None:
        """Watch this connection, which was opened by ``conninfo``, and let the server detect that its client is gone."""
        deadlines = server_timeout.deadlines(conninfo)
        if deadlines is None:
            return
        # Watch before the first statement, because already this statement may get no answer.
        self.sock = _watched(self, conninfo, deadlines, self)
        self.guard_session()

    def guard_session(self) -> None:
        """If this connection is watched, set the settings by which the server detects that its client is gone."""
        if self.sock is None:
            return
        deadlines = self.sock.deadlines
        settings = {IDLE: _milliseconds(deadlines.server), **settings_of(deadlines)}
        for query in _guards(self.info, settings):
            with suppress(*REFUSED):
                learn(self.sock, self.execute(query).fetchone(), settings)
                return

    def reset_session(self, statements: LiteralString) -> None:
        """Execute statements that reset all settings, and set those of ``guard_session`` again, in one round trip."""
        sock = self.sock
        guards = {} if sock is None else sock.settings
        each = [sql.SQL("set {} = {}").format(sql.Identifier(name), value) for name, value in guards.items()]
        self.execute(sql.SQL(statements) + sql.SQL("; ").join(each))

    def handed_on(self) -> Connection:
        """Return a new connection object for the session, and close this object.

        The attributes, adapters and handlers stay with this object. Somebody who still has it cannot use the session.
        Raises OperationalError if another thread uses the connection.
        """
        if not self.lock.acquire(timeout=HANDED_ON_WITHIN):
            raise psycopg.OperationalError("another thread uses the connection")
        try:
            fresh = Connection(self.pgconn)
            if self.sock is not None:
                fresh.sock, self.sock = self.sock, None
                fresh.sock.belong_to(fresh)
            # Last, because the thread that watches forgets a socket whose connection is closed.
            self.pgconn = PGconn.connect_start(CLOSED)
        finally:
            self.lock.release()
        return fresh

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        if self.sock is None:
            return super().wait(gen, *args, **kwargs)
        return _waited(self.sock, super().wait, gen, *args, **kwargs)

    def close(self) -> None:
        if self.sock is None:
            super().close()
            return
        # The mutex prevents closing while a heartbeat uses libpq's connection.
        with self.sock.mutex:
            self.sock.close()
            super().close()


class AsyncConnection(psycopg.AsyncConnection[Any]):
    """The same for an event loop. No heartbeats are sent on it, so it is watched only while it waits."""

    sock: WatchedSocket | None = None

    async def guard(self, conninfo: str) -> None:
        """Watch this connection, which was opened by ``conninfo``, and let the server detect that its client is gone."""
        deadlines = server_timeout.deadlines(conninfo)
        if deadlines is None:
            return
        self.sock = _watched(self, conninfo, deadlines, None)
        for query in _guards(self.info, settings_of(deadlines)):
            with suppress(*REFUSED):
                cursor = await self.execute(query)
                learn(self.sock, await cursor.fetchone())
                return

    async def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        sock = self.sock
        if sock is None:
            return await super().wait(gen, *args, **kwargs)
        try:
            return await super().wait(_noted(sock, gen), *args, **kwargs)
        except psycopg.OperationalError as error:
            if sock.error is None:
                raise
            raise copy(sock.error) from error
        finally:
            sock.rest()

    async def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        await super().close()


def _noted(sock: WatchedSocket, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Wrap a generator of psycopg, and tell the socket when it waits for the server.

    The generator may also compute for long, as in ``executemany`` with the parameters of a caller's iterator. Then the
    server waits for us, and the socket must not count this time.
    """
    try:
        wait_for = next(gen)
        while True:
            if sock.waiting_since is None:
                sock.wait()
            ready = yield wait_for
            # psycopg also resumes the generator now and then without a sign of the server.
            if ready:
                sock.rest()
            wait_for = gen.send(ready)
    except StopIteration as end:
        return end.value


def _waited(
    sock: WatchedSocket, wait: Callable[..., Any], gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any
) -> Any:
    """Let psycopg wait. If the heartbeat has ended the connection, raise OperationalError with its reason."""
    try:
        return wait(_noted(sock, gen), *args, **kwargs)
    except psycopg.OperationalError as error:
        if sock.error is None:
            raise
        raise copy(sock.error) from error
    finally:
        sock.rest()


@contextmanager
def adopted(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Watch a connection that the caller has opened until the block ends. The settings of its session are not changed."""
    conninfo = None if isinstance(connection, Connection) or connection.closed else _dsn(connection.info)
    deadlines = None if conninfo is None else server_timeout.deadlines(conninfo)
    if conninfo is None or deadlines is None or connection in ADOPTED:
        yield
        return
    sock = ADOPTED[connection] = _watched(connection, conninfo, deadlines, connection)
    # The class of the connection knows no socket, so replace its method.
    vars(connection)["wait"] = partial(_waited, sock, partial(type(connection).wait, connection))
    try:
        if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
            with connection.cursor(row_factory=tuple_row) as cursor, suppress(*REFUSED):
                learn(sock, cursor.execute(_guards(connection.info, {})[0]).fetchone())
        yield
    finally:
        # While we hold the lock no heartbeat is open, whose answer the caller's next statement would get.
        with connection.lock:
            sock.close()
            del ADOPTED[connection], vars(connection)["wait"]
        _deliver_notifications(connection)


def _dsn(info: psycopg.ConnectionInfo) -> str:
    return make_conninfo(info.dsn, **({"password": info.password} if info.password else {}))


def _deliver_notifications(connection: psycopg.Connection[Any]) -> None:
    """Pass to psycopg the notifications that came with a heartbeat's answer.

    libpq keeps them, and psycopg looks for them only after the server has sent something else.
    """
    if connection.closed:
        return
    while notification := connection.pgconn.notifies():
        if connection.pgconn.notify_handler is not None:
            connection.pgconn.notify_handler(notification)


def is_at_work(connection: psycopg.Connection[Any]) -> bool:
    """Whether a statement other than a heartbeat runs on a connection."""
    sock = connection.sock if isinstance(connection, Connection) else ADOPTED.get(connection)
    active = connection.info.transaction_status == TransactionStatus.ACTIVE
    return active and (sock is None or not sock.is_beating)


def role_of(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> str:
    """Return the current role of a session, or of its login if the session is not known, as behind a pooler."""
    sock = ADOPTED.get(connection) if isinstance(connection, psycopg.Connection) else None
    sock = sock or getattr(connection, "sock", None)
    return (sock and sock.role) or connection.info.user


def server_patience(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> str:
    """How long a server may keep a transaction whose client sends nothing, as a value for a setting of PostgreSQL. It is
    ``0``, for ever, for a connection that is not watched."""
    sock = connection.sock if isinstance(connection, Connection | AsyncConnection) else None
    return "0" if sock is None else _milliseconds(sock.deadlines.server)


def session_patience(connection: psycopg.Connection[Any]) -> str:
    """The same for a session. Outside of transactions heartbeats are sent only if the session is known."""
    sock = connection.sock if isinstance(connection, Connection) else None
    return "0" if sock is None or sock.pid is None else server_patience(connection)


def address_of(conninfo: str, deadlines: Deadlines) -> str:
    """Return the connection string for a second connection to the same server."""
    return make_conninfo(
        server_timeout.for_libpq(conninfo),
        target_session_attrs="any",
        application_name=HEARTBEAT_NAME,
        # The deadline of the probe is shorter, and ends a connection attempt.
        connect_timeout=max(2, round(2 * deadlines.timeout)),
    )


def _watched(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
    conninfo: str,
    deadlines: Deadlines,
    idle: psycopg.Connection[Any] | None,
) -> WatchedSocket:
    info = connection.info
    parameters = {
        **conninfo_to_dict(conninfo),
        "host": info.host,
        "hostaddr": info.hostaddr,
        "port": info.port,
    }
    there = make_conninfo("", **{name: value for name, value in parameters.items() if value != ""})
    sock = WatchedSocket(
        connection.pgconn.socket,
        deadlines,
        address_of(there, deadlines),
        name=f"{info.host or 'the server'} port {info.port}",
        connection=idle,
    )
    heartbeat.watch(sock)
    return sock


def settings_of(deadlines: Deadlines) -> dict[str, str]:
    """Return the settings by which a server detects that its client is gone, also while a statement runs."""
    return {
        "tcp_keepalives_idle": str(max(1, round(deadlines.timeout / 2))),
        "tcp_keepalives_interval": str(max(1, round(deadlines.timeout / 6))),
        "tcp_keepalives_count": str(server_timeout.KEEPALIVES),
        CHECK: _milliseconds(deadlines.beat),
    }


def _guards(info: psycopg.ConnectionInfo, settings: Mapping[str, str]) -> list[sql.Composed]:
    """Return queries that apply settings to the session, and return the server's time and the session.

    If the server refuses the first, the second is tried. Behind a pooler the session is shared: there the queries set
    nothing, and return no row.
    """
    query = sql.SQL("select {} where pg_catalog.pg_backend_pid() = {}")
    each = {
        name: sql.SQL("pg_catalog.set_config({name}, {value}, false)").format(
            name=name, value=sql.SQL(LESSER).format(name=name, value=value) if name == IDLE else value
        )
        for name, value in settings.items()
    }
    without_check = [setting for name, setting in each.items() if name != CHECK]
    return [
        query.format(
            sql.SQL(", ").join([sql.SQL(f"{OPENED}, current_user::text"), *chosen]), info.backend_pid
        )
        for chosen in (each.values(), without_check)
    ]


def learn(sock: WatchedSocket, row: Any, settings: Iterable[str] = (), *, is_own: bool = True) -> None:
    """Record the server's session of a socket, given the row of a query for ``OPENED``. Without a row nothing changes.

    ``settings``: the names of the settings whose values follow in the row, behind the current role. ``is_own``: whether
    no pooler shares the session.
    """
    if row is not None:
        sock.opened_at, sock.pid, sock.server, sock.role = (
            row[0],
            row[1],
            row[2:5],
            row[5] if row[5:] else None,
        )
        # The server may have refused the last query.
        sock.settings = dict(zip(settings, row[6:], strict=False))
        sock.has_session = is_own


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
