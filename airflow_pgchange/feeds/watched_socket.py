"""A watched connection: the last sign of life of its server, and the deadlines for the next."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import psycopg

from airflow_pgchange.feeds.liveness import Server

PROGRESS = struct.Struct("=QQ")
PROGRESS_AT = 120
"""The offset in Linux's ``tcp_info`` of the counts of bytes that the peer has acknowledged and sent."""


@dataclass(frozen=True)
class Deadlines:
    """The times in seconds after which a silent server is checked, and then given up. All are fractions of ``timeout``.

    They add up, with the time between two checks, to less than ``timeout``. So a dead server is detected within
    ``timeout``."""

    timeout: float

    @property
    def tick(self) -> float:
        """The time between two checks of a connection."""
        return self.timeout / 12

    @property
    def beat(self) -> float:
        """The time between two heartbeats on an idle connection."""
        return self.timeout / 6

    @property
    def doubt(self) -> float:
        """How long a statement may run without a sign of life until the witness, a second connection, checks the
        server."""
        return self.timeout / 4

    @property
    def answer(self) -> float:
        """How long the server may take to answer a heartbeat, and the witness to answer."""
        return self.timeout * 5 / 12

    @property
    def quiet(self) -> float:
        """How long a statement must run without a sign of life before it is given up, if the server does not work on
        it."""
        return self.timeout * 2 / 3

    @property
    def server(self) -> float:
        """How long the server keeps a transaction whose client sends nothing. If a call holds Python's global interpreter
        lock, the heartbeat cannot run. Such a call may last for the difference to ``beat``."""
        return self.timeout * 7 / 4


class WatchedSocket:
    """A socket to a server. ``address`` is the connection string for a second connection to the same server.

    ``pid`` is the process id of the session, and ``opened_at`` a time at which it existed, in seconds since the epoch
    by the server's clock. ``pid`` and ``server`` are None if the session is not known, as behind a pooler.
    ``has_session``: the session is known, and is not shared. ``settings`` are those by which its server watches this
    client. ``role`` is the current role when the session was opened.
    """

    def __init__(
        self,
        fd: int,
        deadlines: Deadlines,
        address: str,
        *,
        name: str,
        connection: psycopg.Connection[Any] | None = None,
    ) -> None:
        self.deadlines = deadlines
        self.address = address
        self.pid: int | None = None
        self.server: Server | None = None
        self.role: str | None = None
        self.opened_at = math.inf
        self.has_session = False
        self.settings: Mapping[str, str] = {}
        self.is_open = True
        self.is_cut = False
        self.is_beating = False
        self.error: psycopg.Error | None = None
        self.mutex = threading.RLock()
        self.waiting_since: float | None = None
        self.heard_at = time.monotonic()
        self._name = name
        self._connection = None if connection is None else ref(connection)
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        self._progress = (0, 0)
        self._moved_at = self.heard_at

    def wait(self) -> None:
        """Record that a thread or task begins to wait for the server."""
        self.waiting_since = time.monotonic()

    def rest(self) -> None:
        """Record the end of the wait: the server has answered, or the connection has ended."""
        self.waiting_since = None
        self.hear()

    def close_if_gone(self) -> None:
        """Close the socket if its connection is closed or was garbage-collected."""
        if self._connection is None:
            return
        connection = self._connection()
        if connection is None or connection.closed:
            self.close()

    def belong_to(self, connection: psycopg.Connection[Any]) -> None:
        """Send heartbeats on another connection object of the same socket."""
        self._connection = ref(connection)

    def hear(self) -> None:
        """Record a sign of life."""
        self.heard_at = time.monotonic()

    def has_answered(self, within: float) -> bool:
        """Whether the server has answered in the last seconds, and has sent nothing since, such as the end of the
        session."""
        return time.monotonic() < self.heard_at + within and not self._has_unread()

    def idle_connection(self) -> psycopg.Connection[Any] | None:
        """The connection, if heartbeats can be sent on it."""
        return None if self._connection is None else self._connection()

    def quiet_for(self) -> float:
        """Return the seconds of waiting in which the server has neither sent nor acknowledged a byte.

        0 if received bytes were not read yet: then this process is busy, as with a blocked event loop.
        """
        since, now = self.waiting_since, time.monotonic()
        if since is None or self._has_unread():
            return 0.0
        progress = self._bytes()
        if progress != self._progress:
            self._progress, self._moved_at = progress, now
        return now - max(since, self._moved_at)

    def cut(self) -> None:
        """End the connection: a thread that waits on it gets an error at once."""
        quiet = self.quiet_for() or time.monotonic() - self.heard_at
        self.is_cut = True
        self.lose(
            psycopg.OperationalError(
                f"no answer from {self._name}: it gave no sign of life for {quiet:.3g} s, so the connection was ended "
                f"(tcp_user_timeout is {self.deadlines.timeout * 1000:.0f} ms)"
            )
        )
        with suppress(OSError), socket_of(self._fd, self._inode) as same:
            same.shutdown(socket.SHUT_RDWR)

    def lose(self, error: psycopg.Error) -> None:
        """Remember why the connection ended."""
        self.error = self.error or error

    def close(self) -> None:
        """Stop watching the connection."""
        self.is_open = False

    def _has_unread(self) -> bool:
        """Whether received bytes, or the end of the connection, were not read yet."""
        with suppress(OSError), socket_of(self._fd, self._inode) as same:
            same.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return True
        return False

    def _bytes(self) -> tuple[int, int]:
        """Return the counts of bytes that the peer has acknowledged and sent. Constant if the system does not provide
        them."""
        with suppress(OSError, AttributeError, struct.error):
            try:
                with socket_of(self._fd, self._inode) as same:
                    info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    acknowledged, received = PROGRESS.unpack_from(info, PROGRESS_AT)
                    return acknowledged, received
            except ConnectionAbortedError:
                self.close()
        return 0, 0


@contextmanager
def socket_of(fd: int, inode: int) -> Iterator[socket.socket]:
    """Yield the socket with a duplicated descriptor, which cannot be reused for another file during the block. Raises
    ConnectionAbortedError if ``fd`` is not this socket any more, because the connection was closed."""
    copy = os.dup(fd)
    try:
        if os.fstat(copy).st_ino != inode:
            raise ConnectionAbortedError("the connection is closed")
        same = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with same:
        yield same
