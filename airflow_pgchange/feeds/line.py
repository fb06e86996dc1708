"""A watched connection: when its server was last heard of, and by when it must be heard of again."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import psycopg

from airflow_pgchange.feeds.witness import Server

PROGRESS = struct.Struct("=QQ")
PROGRESS_AT = 120
"""Where Linux's ``tcp_info`` has the bytes that the peer has acknowledged, and those that were received from it."""


@dataclass(frozen=True)
class Deadlines:
    """By when a server must prove that it is there, in seconds: parts of ``timeout``, so that a silence is noticed
    before that has passed, whenever it begins between two looks."""

    timeout: float

    @property
    def tick(self) -> float:
        """Between two looks at a connection."""
        return self.timeout / 12

    @property
    def beat(self) -> float:
        """Between two heartbeats on an idle connection."""
        return self.timeout / 6

    @property
    def doubt(self) -> float:
        """How long a statement may be quiet until another connection asks what it is at."""
        return self.timeout / 4

    @property
    def answer(self) -> float:
        """How long the answer to a heartbeat may take, or to that question."""
        return self.timeout * 5 / 12

    @property
    def quiet(self) -> float:
        """How long a statement must be quiet to be given up if the server says that it does not work on it."""
        return self.timeout * 2 / 3

    @property
    def server(self) -> float:
        """How long the server keeps a transaction of a client that sends nothing. A client whose heartbeat cannot run,
        as one call holds Python's global interpreter lock, has the difference to ``beat`` for that."""
        return self.timeout * 7 / 4


class Line:
    """A socket to a server. ``address`` is the connection string of another connection to the same server.

    ``pid`` is the server's process, and ``opened_at`` a time by the server's clock when it was there, in seconds of the
    epoch. ``pid`` and ``server`` are None where the session is not known, as behind a pooler. If ``has_session``, it
    is nobody else's, too.
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
        self.opened_at = math.inf
        self.has_session = False
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
        """Somebody waits for the server from now on."""
        self.waiting_since = time.monotonic()

    def rest(self) -> None:
        """Nobody waits any more: the server has answered, or the connection has ended."""
        self.waiting_since = None
        self.hear()

    def look(self) -> None:
        """Close the line if nobody has its connection any more."""
        if self._connection is None:
            return
        connection = self._connection()
        if connection is None or connection.closed:
            self.close()

    def hear(self) -> None:
        """The server has answered."""
        self.heard_at = time.monotonic()

    def idle_connection(self) -> psycopg.Connection[Any] | None:
        """The connection, if heartbeats can be sent on it."""
        return None if self._connection is None else self._connection()

    def quiet_for(self) -> float:
        """Seconds for which somebody has been waiting while no byte came, and none of ours was taken.

        0 if bytes came that were not read yet: then this process is busy, as with a blocked event loop.
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
        """Watch it no more."""
        self.is_open = False

    def _has_unread(self) -> bool:
        """Whether bytes of the server, or the end of the connection, wait to be read."""
        with suppress(OSError), socket_of(self._fd, self._inode) as same:
            same.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return True
        return False

    def _bytes(self) -> tuple[int, int]:
        """Bytes that the peer has acknowledged and sent; always the same if the system does not tell."""
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
    """A socket by a number of its own, so that it cannot become another one meanwhile. Raises ConnectionAbortedError
    if ``fd`` is not this socket any more, as the connection was closed."""
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
