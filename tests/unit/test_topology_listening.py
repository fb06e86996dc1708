"""The addresses that a relay listens on."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from airflow_pgchange.topology.listening import close, listen

OURS = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
LACKING = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
UNKNOWN = (socket.AF_APPLETALK, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))


def listened(monkeypatch: pytest.MonkeyPatch, *found: tuple[object, ...]) -> list[str]:
    """Return the addresses to listen on for a name that resolves to ``found``."""

    async def named(*args: object, **kwargs: object) -> list[tuple[object, ...]]:
        return list(found)

    async def work() -> list[str]:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", named)
        sockets = await listen("localhost", 0)
        addresses = [sock.getsockname()[0] for sock in sockets]
        close(sockets)
        return addresses

    return asyncio.run(work())


def test_addresses_that_this_machine_has_not_are_left_out(monkeypatch):
    assert listened(monkeypatch, LACKING, UNKNOWN, OURS) == ["127.0.0.1"]


def test_a_name_of_which_this_machine_has_no_address_is_refused(monkeypatch):
    with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
        listened(monkeypatch, LACKING)


def test_an_address_in_use_is_refused_also_where_another_is_free(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = (*OURS[:4], other.getsockname())
        with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            listened(monkeypatch, OURS, taken)
