"""Listening sockets, and the loop that accepts their connections.

We do not use asyncio's servers: while the process has no free file descriptor, they log a traceback for each waiting
connection.
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
"""Length of the kernel's queue of connections that are not accepted yet."""
PAUSE = 1.0
"""Seconds before accept() is retried after it failed. File descriptors become free when other connections end."""
QUIET = 60.0
"""Minimum seconds between two log lines about a failing accept()."""
ADVICE = "raise the limit of open files (`ulimit -n`), or give a lower --max-clients"
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""TCP options that detect a dead peer within about a minute, also on an idle connection."""

Welcome = Callable[[socket.socket], Awaitable[None]]


async def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host`` that this machine has.

    Raises OSError if this machine has none of them, or if an address is in use.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets = list[socket.socket]()
    unavailable: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:
                unavailable = error
                continue
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # IPv4 addresses of the same name get their own sockets.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind(address)
            except OSError as error:
                # Skip the address: many containers turn IPv6 off although their host name has an IPv6 address.
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                unavailable = error
                sockets.pop().close()
                continue
            sock.listen(BACKLOG)
    except BaseException:
        close(sockets)
        raise
    if not sockets and unavailable is not None:
        raise unavailable
    return sockets


def close(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def keep_alive(sock: socket.socket) -> None:
    """Turn on TCP keepalive, so that the kernel detects a dead peer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def admit(listening: socket.socket, welcome: Welcome) -> None:
    """Accept connections until cancelled, and pass each socket to ``welcome``."""
    loop = asyncio.get_running_loop()
    log_next = loop.time()
    while True:
        try:
            sock, _ = await loop.sock_accept(listening)
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if loop.time() >= log_next:
                log.warning("cannot accept new connections, which wait: %s; %s", error, ADVICE)
                log_next = loop.time() + QUIET
            await asyncio.sleep(PAUSE)
            continue
        # The peer may have disconnected already.
        with suppress(OSError):
            await welcome(sock)
