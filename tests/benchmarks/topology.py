"""The relay: the time from a commit to the last of many clients, beside polling; a burst of changes; the memory of a
client."""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import struct
import time
import zlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.topology import replies
from tests.benchmarks.measure import Report, section
from tests.relay_process import RelayProcess, relay_process
from tests.topology import make_catalogue

CLIENTS = int(os.environ.get("CLIENTS", "1000"))
ROUNDS = int(os.environ.get("ROUNDS", "30"))
BUCKETS = 30_000
POLLERS = 100
"""The number of sessions that poll. Each needs a connection to the catalogue, so there cannot be many more."""
POLL = 0.5
HELLO = b"user\0bench\0smart_connector\x000.1\0\0"


def run(conninfo: str, report: Report) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with psycopg.connect(conninfo, autocommit=True) as writer:
        make_catalogue(writer)
        writer.execute("delete from topology._pico_bucket")
        writer.execute(
            "insert into topology._pico_bucket select 'default', n, n, 'active', 'r1', 'r1' "
            "from generate_series(1, %s) as n",
            [BUCKETS],
        )
        with (
            relay_process(conninfo) as relay,
            section(f"{CLIENTS} clients of a topology of {BUCKETS} ranges"),
        ):
            asyncio.run(_measure(conninfo, writer, relay, report))


async def _measure(
    conninfo: str, writer: psycopg.Connection[Any], relay: RelayProcess, report: Report
) -> None:
    before = _memory(relay.pid)
    began = time.perf_counter()
    clients = await asyncio.gather(*[_client(relay.port) for _ in range(CLIENTS)])
    report.say("all connect at once and have their snapshots", time.perf_counter() - began, "s")
    await asyncio.sleep(1)
    report.say("memory of the relay for a client", (_memory(relay.pid) - before) / CLIENTS / 1024, "KB")
    told = [await _change(writer, clients, number) for number in range(ROUNDS)]
    report.say("commit to the last client, median", statistics.median(told) * 1000, "ms", most=250)
    polled = await _polled(conninfo, writer)
    report.say(
        f"the last of {POLLERS} who poll every {POLL:g} s, median", statistics.median(polled) * 1000, "ms"
    )
    await _have(clients, _sent(writer, await _move(writer, clients, "copying")))
    await _burst(writer, clients, relay, report)
    report.say("clients that were sent the same changes", await _agreeing(writer, clients), "", least=CLIENTS)


async def _change(writer: psycopg.Connection[Any], clients: list[_Client], number: int) -> float:
    """Return the seconds from the commit of one change until every client has received it."""
    await asyncio.sleep(0.1 + number % 10 / 97)
    waiting = [asyncio.ensure_future(client.next()) for client in clients]
    await asyncio.sleep(0)
    await asyncio.to_thread(_change_state, writer)
    committed = time.monotonic()
    return max(await asyncio.gather(*waiting)) - committed


async def _burst(
    writer: psycopg.Connection[Any], clients: list[_Client], relay: RelayProcess, report: Report
) -> None:
    began = time.monotonic()
    last = await _move(writer, clients, "copied")
    committed = time.monotonic()
    await _have(clients, _sent(writer, last))
    report.say(f"a burst of {BUCKETS} changes, one statement", committed - began, "s")
    report.say("its commit to the last client that has all of them", time.monotonic() - committed, "s")
    report.say("memory of the relay at its highest", _memory(relay.pid, "VmHWM") / 1024**2, "MB")


async def _agreeing(writer: psycopg.Connection[Any], clients: list[_Client]) -> int:
    """Count the clients that get the events of a burst byte by byte as the log has them. This is not timed."""
    for client in clients:
        client.sum = 0
    sent = _sent(writer, await _move(writer, clients, "copying"))
    await _have(clients, sent)
    return sum(client.sum == zlib.crc32(sent) for client in clients)


async def _move(writer: psycopg.Connection[Any], clients: list[_Client], state: str) -> int:
    """Set every range of buckets to a state. Return the number of the last change before that."""
    for client in clients:
        client.forget()
    (last,) = writer.execute("select coalesce(max(index), 0) from topology.log").fetchone() or (0,)
    query = "update topology._pico_bucket set state = %s, target_replicaset_name = 'r2'"
    await asyncio.to_thread(writer.execute, query, [state])
    return int(last)


def _sent(writer: psycopg.Connection[Any], last: int) -> bytes:
    """Return the number of bytes that the relay has to send to each client for a change."""
    rows = writer.execute("select event::text from topology.log where index > %s order by index", [last])
    return b"".join(replies.notice(event) for (event,) in rows)


async def _have(clients: list[_Client], sent: bytes) -> None:
    await asyncio.gather(*[client.have(len(sent)) for client in clients])


async def _polled(conninfo: str, writer: psycopg.Connection[Any]) -> list[float]:
    async with AsyncExitStack() as opened:
        pollers = [
            await opened.enter_async_context(await psycopg.AsyncConnection.connect(conninfo, autocommit=True))
            for _ in range(POLLERS)
        ]

        async def poll(connection: psycopg.AsyncConnection[Any], after: int, phase: float) -> float:
            await asyncio.sleep(phase)
            while True:
                cursor = await connection.execute("select index from topology.now_at()")
                row = await cursor.fetchone()
                if row is not None and row[0] > after:
                    return time.monotonic()
                await asyncio.sleep(POLL)

        seconds = []
        for _ in range(max(3, ROUNDS // 5)):
            (at,) = writer.execute("select index from topology.now_at()").fetchone() or (0,)
            polling = [
                asyncio.ensure_future(poll(connection, at, place / POLLERS * POLL))
                for place, connection in enumerate(pollers)
            ]
            await asyncio.sleep(2 * POLL)
            await asyncio.to_thread(_change_state, writer)
            committed = time.monotonic()
            seconds.append(max(await asyncio.gather(*polling)) - committed)
        return seconds


class _Client(asyncio.Protocol):
    """A client that counts the bytes after the snapshot, and records the time of the last byte.

    If ``sum`` is not None, it also adds the bytes up.
    """

    sum: int | None = None

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._bytes = 0
        self._wanted = 0
        self._heard: asyncio.Future[float] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(struct.pack("!II", 8 + len(HELLO), 3 << 16) + HELLO)

    def data_received(self, data: bytes) -> None:
        if not self.ready.done():
            self._tail = (self._tail + data)[-6:]
            if self._tail == replies.READY:
                self.ready.set_result(None)
            return
        self._bytes += len(data)
        if self.sum is not None:
            self.sum = zlib.crc32(data, self.sum)
        if self._heard is not None and self._bytes >= self._wanted:
            self._heard.set_result(time.monotonic())
            self._heard = None

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.ready, self._heard):
            if future is not None and not future.done():
                future.set_exception(ConnectionError("the relay let a client go"))

    async def next(self) -> float:
        """Return the time at which more bytes have arrived."""
        return await self._until(1)

    async def have(self, size: int) -> float:
        """Return the time at which this number of bytes had arrived since the last change."""
        return await self._until(size)

    def forget(self) -> None:
        """Start counting from here."""
        self._bytes = 0

    async def _until(self, size: int) -> float:
        if self._bytes < size:
            self._wanted = size
            self._heard = asyncio.get_running_loop().create_future()
            at = await self._heard
        else:
            at = time.monotonic()
        self._bytes = 0
        return at


async def _client(port: int) -> _Client:
    _, client = await asyncio.get_running_loop().create_connection(_Client, "127.0.0.1", port)
    await client.ready
    return client


def _change_state(writer: psycopg.Connection[Any]) -> None:
    """Change the state of an instance to the other state."""
    writer.execute(
        "select topology.set_state(name, case current_state ->> 0 when 'Online' then 'Offline' else 'Online' end) "
        "from topology._pico_instance where name = 'r1-i2'"
    )


def _memory(pid: int, what: str = "VmRSS") -> int:
    """Return the bytes of a process's memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))
