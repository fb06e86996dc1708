"""The number of sockets that clients may use in the relay."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_pgchange.topology import listening
from airflow_pgchange.topology.catalogue import Catalogue, Term
from airflow_pgchange.topology.connection import Limits
from airflow_pgchange.topology.raft import Raft
from airflow_pgchange.topology.relay import REFUSALS, Relay
from demo.postgres import free_port


class Empty(Catalogue):
    """A catalogue that never changes."""

    def __init__(self):
        self.reached = asyncio.Event()

    async def connect(self):
        self.reached.set()
        return Term(1, 1, 1, datetime.now(UTC), 1, 1)

    async def now(self):
        return Raft(1, 1)

    async def events(self, after):
        return []

    async def close(self):
        pass


@asynccontextmanager
async def relay(**limits):
    """The port of a relay in this process."""
    catalogue, stop, port = Empty(), asyncio.Event(), free_port()
    serving = asyncio.create_task(
        Relay(catalogue, None, limits=Limits(**limits)).serve("127.0.0.1", port, stop)
    )
    await catalogue.reached.wait()
    try:
        yield port
    finally:
        stop.set()
        await serving


async def turns():
    """Let the event loop run for long enough to accept all pending connections."""
    for _ in range(500):
        await asyncio.sleep(0)


def open_files():
    # Sockets of an earlier test could otherwise be closed between two counts.
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def silent():
    """Create sockets that are not connected yet and will send nothing."""
    sockets = [socket.socket() for _ in range(2 + REFUSALS + 20)]
    yield sockets
    for sock in sockets:
        sock.close()


async def test_clients_who_have_not_signed_in_take_no_more_sockets_than_there_may_be(silent):
    async with relay(max_clients=2) as port:
        before = open_files()
        for sock in silent:
            sock.connect(("127.0.0.1", port))
        await turns()
        assert open_files() - before == 2 + REFUSALS


async def test_a_client_for_whom_no_socket_is_left_is_refused_at_once(silent):
    async with relay(max_clients=2) as port:
        for sock in silent:
            sock.connect(("127.0.0.1", port))
        await turns()
        assert b"there are 2 clients already" in silent[-1].recv(1024, socket.MSG_DONTWAIT)
        assert silent[-1].recv(1024, socket.MSG_DONTWAIT) == b""


async def test_there_is_room_again_when_others_have_gone(silent):
    async with relay(max_clients=2) as port:
        for sock in silent[:-1]:
            sock.connect(("127.0.0.1", port))
        await turns()
        for sock in silent[:-1]:
            sock.close()
        await turns()
        silent[-1].connect(("127.0.0.1", port))
        await turns()
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1024, socket.MSG_DONTWAIT)


async def test_at_the_limit_of_open_files_connections_wait_and_the_log_says_so_once(
    silent, caplog, monkeypatch
):
    monkeypatch.setattr(listening, "PAUSE", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with relay(max_clients=1000) as port:
        with closing(socket.socket()) as lowest:
            free = lowest.fileno()
        before = open_files()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
            for sock in silent:
                sock.connect(("127.0.0.1", port))
            await turns()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "Too many open files" in record.getMessage()
        assert record.exc_info is None
        await turns()
        assert open_files() - before == len(silent)
