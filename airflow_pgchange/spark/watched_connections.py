"""Watch ADBC's connections like those of psycopg: end the wait for a server that gives no sign of life.

ADBC does not tell which socket it uses. So we take the only socket that is new after it has connected.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcStatement
from adbc_driver_manager import Error as AdbcError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.feeds import heartbeat, server_timeout, watched_connection
from airflow_pgchange.feeds.error_translation import ADVICE
from airflow_pgchange.feeds.watched_socket import Deadlines, WatchedSocket, socket_of
from airflow_pgchange.spark.installed_versions import check_arrow_driver

OPEN_FILES = Path("/dev/fd")

log = logging.getLogger(__name__)


class Watched:
    """An ADBC statement in a transaction. Each call of the driver counts as a wait for the server."""

    def __init__(self, statement: AdbcStatement, sock: WatchedSocket | None) -> None:
        self.statement = statement
        self._sock = sock

    def update(self, query: str | None = None) -> None:
        """Execute a query, or the statement that was prepared."""
        if query is not None:
            self.statement.set_sql_query(query)
        with self.waiting():
            self.statement.execute_update()

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """Stream the rows of a query."""
        self.statement.set_sql_query(query)
        with self.waiting():
            stream, _ = self.statement.execute_query()
        with pa.RecordBatchReader.from_stream(stream) as reader:
            while True:
                try:
                    with self.waiting():
                        batch = reader.read_next_batch()
                except StopIteration:
                    return
                yield batch

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as a wait for the server. Raises ServerUnavailable if the heartbeat has ended the
        connection."""
        if self._sock is None:
            yield
            return
        self._sock.wait()
        try:
            yield
        except (AdbcError, OSError) as error:
            if self._sock.error is None:
                raise
            raise ServerUnavailable(f"{self._sock.error}: {ADVICE[ServerUnavailable]}") from error
        finally:
            self._sock.rest()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Do not count the block as a wait, inside that of ``waiting``: the driver runs our code and the server waits."""
        if self._sock is None:
            yield
            return
        self._sock.rest()
        yield
        self._sock.wait()


@contextmanager
def transaction(conninfo: str) -> Iterator[Watched]:
    """Yield a statement in a transaction, which commits at the end of the block."""
    check_arrow_driver()
    with ExitStack() as opened:
        watched = opened.enter_context(_opened(conninfo))
        if _quotes_all(watched):
            opened.close()
            watched = opened.enter_context(_opened(_unquoted(conninfo)))
        yield watched


def _quotes_all(watched: Watched) -> bool:
    """Whether the session quotes all names. The driver looks up types by their unquoted names when it connects, so it
    would know no type of this session."""
    (batch,) = watched.batches("select pg_catalog.current_setting('quote_all_identifiers')")
    return batch.column(0)[0].as_py() in ("on", b"on")


def _unquoted(conninfo: str) -> str:
    options = conninfo_to_dict(conninfo).get("options") or ""
    return make_conninfo(conninfo, options=f"{options} -c quote_all_identifiers=off".strip())


@contextmanager
def _opened(conninfo: str) -> Iterator[Watched]:
    before = _sockets()
    deadlines = server_timeout.deadlines(conninfo)
    with (
        adbc_driver_postgresql.connect(server_timeout.for_libpq(conninfo)) as database,
        AdbcConnection(database) as connection,
    ):
        sock = None if deadlines is None else _watched_socket(conninfo, deadlines, before)
        try:
            connection.set_autocommit(False)
            with AdbcStatement(connection) as statement:
                watched = Watched(statement, sock)
                if sock is not None:
                    _guard(watched, sock)
                yield watched
            with watched.waiting():
                connection.commit()
        finally:
            if sock is not None:
                sock.close()


def _watched_socket(conninfo: str, deadlines: Deadlines, before: dict[int, int]) -> WatchedSocket | None:
    """Watch the connection that was opened since ``before``, and return its socket; None if it is not known."""
    parameters = conninfo_to_dict(conninfo)
    if str(parameters.get("host") or "").startswith(("/", "@")):
        # The system closes a Unix socket with its server. A TCP socket of this port belongs to another connection.
        return None
    ports = str(parameters.get("port") or "5432").split(",")
    sockets = {fd: peer for fd, peer in _peers(before).items() if str(peer[1]) in ports}
    if len(sockets) != 1:
        log.warning(
            "a connection of ADBC to port %s is not watched, because %d connections were opened at the same time. If "
            "the server falls silent, only TCP's own timeouts end the wait",
            " or ".join(ports),
            len(sockets),
        )
        return None
    [(fd, (address, port))] = sockets.items()
    host = next(
        (host for host in str(parameters.get("host") or "").split(",") if _is_of(host, address, port)),
        address,
    )
    there = make_conninfo(conninfo, host=host, hostaddr=address, port=port)
    sock = WatchedSocket(
        fd, deadlines, watched_connection.address_of(there, deadlines), name=f"{host} port {port}"
    )
    heartbeat.watch(sock)
    return sock


def _guard(watched: Watched, sock: WatchedSocket) -> None:
    """Let the server check for its client during this transaction, and note the session."""
    settings = ", ".join(
        f"pg_catalog.set_config('{name}', '{value}', true)"
        for name, value in watched_connection.settings_of(sock.deadlines).items()
        if name != watched_connection.CHECK
    )
    for batch in watched.batches(f"select {watched_connection.OPENED}, {settings}"):
        # ADBC does not tell whether a pooler shares the session with other clients.
        watched_connection.learn(
            sock, tuple(batch.column(index)[0].as_py() for index in range(5)), is_own=False
        )


def _sockets() -> dict[int, int]:
    """Return the open sockets of this process: their file descriptors by their inodes."""
    inodes: dict[int, int] = {}
    with suppress(OSError):
        for entry in OPEN_FILES.iterdir():
            with suppress(OSError, ValueError):
                status = os.fstat(int(entry.name))
                if stat.S_ISSOCK(status.st_mode):
                    inodes[status.st_ino] = int(entry.name)
    return inodes


def _peers(before: dict[int, int]) -> dict[int, Any]:
    """Return the peers of sockets that are new since ``before`` and connected to a host."""
    peers = {}
    for identity, fd in _sockets().items():
        if identity not in before:
            with suppress(OSError), socket_of(fd, identity) as same:
                if same.family in (socket.AF_INET, socket.AF_INET6):
                    peers[fd] = same.getpeername()[:2]
    return peers


def _is_of(host: str, address: str, port: int) -> bool:
    with suppress(OSError):
        return any(info[4][0] == address for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return False
