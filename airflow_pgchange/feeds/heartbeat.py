"""Detect a server that is gone without a FIN or RST, even if a proxy still answers keepalives.

One thread of this process watches all connections. It sends an empty query on an idle connection now and then. A busy
connection cannot take a query. So a second connection to the same address (``liveness.py``) checks that the server still
works on the statement. A connection without such proof is cut: its socket is shut down. A thread that waits on it then
gets an error at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus

from airflow_pgchange.feeds.liveness import LivenessProbe, ProbeResult, Server
from airflow_pgchange.feeds.watched_socket import WatchedSocket

HEARTBEAT = b"/* airflow_pgchange: heartbeat */"
"""An empty query. It takes no snapshot, and works in a failed transaction, too."""
FIRST_LOOK, LONGEST_LOOK = 0.0005, 0.05
"""The first and the longest pause between two checks for the answer to a heartbeat, in seconds. They are short because
the heartbeat holds the connection's lock."""
LINGER = 5.0
"""Seconds after which the thread ends if there is nothing to watch."""
AGAIN = 1.0
"""Seconds until heartbeats are started again after an unexpected error."""
ENDS = ("FATAL", "PANIC")
CAN_ASK = (TransactionStatus.IDLE, TransactionStatus.INTRANS, TransactionStatus.INERROR)

log = logging.getLogger(__name__)


def _started(work: Callable[[], None]) -> bool:
    """Start the thread of the heartbeat; False at the end of the process.

    Some releases of Python 3.12 start no thread there. A connection that is opened so late goes without a heartbeat.
    """
    try:
        threading.Thread(target=work, name="pgchange-heartbeat", daemon=True).start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        return False
    return True


class Watch:
    """The thread that watches connections. It is started when there is something to watch."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the state. A forked process has no copy of its parent's thread, and must not use the parent's
        connections."""
        self._changed = threading.Lock()
        self._sockets: WeakSet[WatchedSocket] = WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = False
        self._rest = LINGER
        self._wake = asyncio.Event()
        self._probes: dict[str, LivenessProbe] = {}
        self._tasks: dict[WatchedSocket, asyncio.Task[None]] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def add(self, sock: WatchedSocket) -> None:
        """Watch a socket until it is closed or nobody refers to it any more."""
        with self._changed:
            self._sockets.add(sock)
            if not self._running:
                # This raises if the system can start no thread. The next socket then tries again.
                self._running = _started(self._run)
            elif self._loop is not None and sock.deadlines.tick < self._rest:
                self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        while True:
            try:
                asyncio.run(self._work())
            except Exception:
                # Start again: without heartbeats servers would end healthy transactions.
                log.exception("the heartbeat of connections failed, will start again")
                self._probes, self._tasks, self._endings = {}, {}, set()
                time.sleep(AGAIN)
            else:
                return

    async def _work(self) -> None:
        self._wake = asyncio.Event()
        with self._changed:
            self._loop = asyncio.get_running_loop()
        try:
            await self._go_on()
        except Exception:
            # The loop closes now, so it must not be woken any more.
            with self._changed:
                self._loop = None
            raise
        finally:
            # Wait for the heartbeats: the end of the loop would cancel one between its query and the answer, and
            # release its connection.
            if self._tasks:
                await asyncio.wait(self._tasks.values())

    async def _go_on(self) -> None:
        needed_at = time.monotonic()
        while True:
            self._rest = await self._check_all()
            if self._rest < math.inf or self._endings:
                needed_at = time.monotonic()
            elif time.monotonic() - needed_at > LINGER:
                with self._changed:
                    if not any(sock.is_open for sock in self._sockets):
                        self._running, self._loop = False, None
                        return
            self._rest = min(self._rest, LINGER)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._rest)
            self._wake.clear()

    async def _check_all(self) -> float:
        """Start a check of each socket, and return the seconds until the next check; infinite if there are no sockets.

        It keeps no reference to a socket, because a socket lives as long as its connection.
        """
        with self._changed:
            sockets = [sock for sock in self._sockets if sock.is_open]
        self._tasks = {sock: task for sock, task in self._tasks.items() if not task.done()}
        for sock in sockets:
            if sock not in self._tasks:
                self._tasks[sock] = asyncio.create_task(self._check(sock))
        await self._dismiss(sockets)
        return min((sock.deadlines.tick for sock in sockets), default=math.inf)

    async def _dismiss(self, sockets: list[WatchedSocket]) -> None:
        """Close the probes that no waiting socket needs."""
        needed = {sock.address for sock in sockets if sock.quiet_for() >= sock.deadlines.tick}
        for address in [address for address in self._probes if address not in needed]:
            await self._probes.pop(address).close()

    async def _check(self, sock: WatchedSocket) -> None:
        """Check a socket for a sign of life if that is due, and cut it if there is none."""
        try:
            sock.close_if_gone()
            if not sock.is_open:
                return
            if sock.waiting_since is not None:
                await self._probe_server(sock)
            elif time.monotonic() - sock.heard_at >= sock.deadlines.beat:
                await _beat(sock)
        except Exception:
            log.exception("could not watch a connection")
        if sock.error is not None and sock.is_open:
            sock.close()
            log.warning("%s", sock.error)
            if sock.is_cut and sock.has_session and sock.pid is not None and sock.server is not None:
                ending = asyncio.create_task(_end_session(sock, sock.pid, sock.server))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)

    async def _probe_server(self, sock: WatchedSocket) -> None:
        deadlines = sock.deadlines
        if sock.quiet_for() < deadlines.doubt:
            return
        probe = self._probes.setdefault(sock.address, LivenessProbe(sock.address))
        result = await probe.probe(
            sock.pid, sock.server, opened_at=sock.opened_at, within=deadlines.answer, settled=deadlines.doubt
        )
        # Check again, because the answer to the statement may have come in the meantime.
        least = {
            ProbeResult.SILENCE: deadlines.doubt,
            ProbeResult.AT_REST: deadlines.quiet,
            ProbeResult.AT_WORK: math.inf,
        }
        if sock.quiet_for() >= least[result]:
            sock.cut()


async def _beat(sock: WatchedSocket) -> None:
    """Send a heartbeat on an idle connection, and cut the socket if the answer does not come in time."""
    connection = sock.idle_connection()
    if connection is None or not connection.lock.acquire(blocking=False):
        return
    try:
        # Add up the pauses instead of reading the clock, because this process may have been stopped for a while.
        waited, pause = 0.0, FIRST_LOOK
        if not _send(sock, connection):
            return
        while not _answered(sock, connection):
            if waited >= sock.deadlines.answer:
                sock.cut()
                # Let libpq notice the end, too.
                _answered(sock, connection)
                return
            await asyncio.sleep(pause)
            waited += pause
            pause = min(2 * pause, LONGEST_LOOK)
        sock.hear()
    except psycopg.Error as error:
        sock.lose(error)
    finally:
        sock.is_beating = False
        connection.lock.release()


def _send(sock: WatchedSocket, connection: psycopg.Connection[Any]) -> bool:
    with sock.mutex:
        pgconn = connection.pgconn
        if (
            not sock.is_open
            or pgconn.transaction_status not in CAN_ASK
            or pgconn.pipeline_status != PipelineStatus.OFF
            # A pooler would have to assign a session to the heartbeat, and may have none for a long time.
            or (sock.pid is None and pgconn.transaction_status == TransactionStatus.IDLE)
        ):
            return False
        sock.is_beating = True
        pgconn.send_query(HEARTBEAT)
        pgconn.flush()
        return True


def _answered(sock: WatchedSocket, connection: psycopg.Connection[Any]) -> bool:
    with sock.mutex:
        if not sock.is_open:
            return True
        pgconn = connection.pgconn
        pgconn.flush()
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                return True
            if result.status == ExecStatus.FATAL_ERROR:
                error = error_from_result(result)
                # Any other error proves that the server is alive, for example the error of a cancelled heartbeat.
                if error.diag.severity_nonlocalized in ENDS:
                    raise error
        return False


async def _end_session(sock: WatchedSocket, pid: int, server: Server) -> None:
    """End the session of a socket that was cut, if a new connection reaches the server again. Best effort.

    Otherwise the session may hold its locks until the server's own timeouts.
    """
    ends = time.monotonic() + sock.deadlines.timeout
    while time.monotonic() < ends:
        with suppress(psycopg.Error, TimeoutError, OSError):
            async with asyncio.timeout(sock.deadlines.answer):
                connection = await psycopg.AsyncConnection.connect(
                    sock.address, autocommit=True, prepare_threshold=None
                )
                async with connection:
                    await connection.execute(
                        "select pg_catalog.pg_terminate_backend(a.pid) from pg_catalog.pg_stat_activity as a "
                        "where a.pid = %s and extract(epoch from a.backend_start) <= %s "
                        "and extract(epoch from pg_catalog.pg_postmaster_start_time())::float8 = %s",
                        [pid, sock.opened_at, server[0]],
                    )
            return
        await asyncio.sleep(sock.deadlines.tick)


WATCH = Watch()


os.register_at_fork(after_in_child=WATCH.forget)


def watch(sock: WatchedSocket) -> None:
    """Watch a socket in this process."""
    WATCH.add(sock)
