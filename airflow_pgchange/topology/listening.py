"""Listening sockets, and accepting connections from them.

asyncio's own servers log a traceback for each connection that waits while no more files can be opened.
"""

from __future__ import annotations

import asyncio
import errno
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
ADVICE = "raise the limit of open files (`ulimit -n`), or give a lower --max-clients"
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""A peer that vanished is noticed within about a minute, also while nothing happens."""

Welcome = Callable[[socket.socket], Awaitable[None]]


async def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host`` that this machine has. Raises OSError if it has none, or if one is in use."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets = list[socket.socket]()
    lacking: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:
                lacking = error
                continue
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # The IPv4 address of the same name has a socket of its own.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind(address)
            except OSError as error:
                # A host's name often has an IPv6 address where IPv6 is switched off, as in many containers.
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                lacking = error
                sockets.pop().close()
                continue
            sock.listen(BACKLOG)
    except BaseException:
        close(sockets)
        raise
    if not sockets and lacking is not None:
        raise lacking
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


async def admit(listening: socket.socket, welcome: Welcome) -> None:
    """Accept connections until cancelled. ``welcome`` takes each socket."""
    loop = asyncio.get_running_loop()
    log_next = loop.time()
    while True:
        try:
            sock, _ = await loop.sock_accept(listening)
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if loop.time() >= log_next:
                log.warning("new connections cannot be accepted and wait: %s; %s", error, ADVICE)
                log_next = loop.time() + QUIET
            await asyncio.sleep(PAUSE)
            continue
        # The peer may have gone meanwhile.
        with suppress(OSError):
            await welcome(sock)
