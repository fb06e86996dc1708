"""Listening sockets that accept a connection only while there is room for it.

asyncio's own servers accept whatever comes. At the limit of open files they log a traceback for each waiting connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
PAUSE = 1.0
"""Seconds until accepting is tried again after it failed: open files become free when other connections end."""
QUIET = 60.0
"""Seconds in which failures to accept are logged once."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""A peer that vanished is noticed within about a minute, also while nothing happens."""

Welcome = Callable[[socket.socket], Awaitable[None]]


async def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host``. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets = list[socket.socket]()
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # The IPv4 address of the same name has a socket of its own.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
    except BaseException:
        close(sockets)
        raise
    return sockets


def close(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice a peer that vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Door:
    """Accepts connections while it is open. ``welcome`` takes each socket."""

    def __init__(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self._open = asyncio.Event()
        self._open.set()
        self._logged_at: float | None = None

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        """Leave further connections to the kernel's backlog until ``open()``."""
        self._open.clear()

    async def admit(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._open.wait()
            try:
                sock, _ = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._log(error)
                await asyncio.sleep(PAUSE)
                continue
            # The peer may have gone meanwhile.
            with suppress(OSError):
                await self._welcome(sock)

    def _log(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if self._logged_at is None or now - self._logged_at > QUIET:
            log.warning(
                "new connections cannot be accepted and wait: %s; raise the limit of open files (`ulimit -n`), "
                "or give a lower --max-clients",
                error,
            )
            self._logged_at = now
