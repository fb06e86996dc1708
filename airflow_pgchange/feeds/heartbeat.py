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

from airflow_pgchange.feeds.liveness import Found, Server, Witness
from airflow_pgchange.feeds.watched_socket import Line

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
        self._lines: WeakSet[Line] = WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = False
        self._rest = LINGER
        self._wake = asyncio.Event()
        self._witnesses: dict[str, Witness] = {}
        self._tasks: dict[Line, asyncio.Task[None]] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def add(self, line: Line) -> None:
        """Watch a line until it is closed or nobody refers to it any more."""
        with self._changed:
            self._lines.add(line)
            if not self._running:
                # This raises if the system can start no thread. The next line then tries again.
                self._running = _started(self._run)
            elif self._loop is not None and line.deadlines.tick < self._rest:
                self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        while True:
            try:
                asyncio.run(self._work())
            except Exception:
                # Start again: without heartbeats servers would end healthy transactions.
                log.exception("the heartbeat of connections failed, will start again")
                self._witnesses, self._tasks, self._endings = {}, {}, set()
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
            self._rest = await self._look_at_all()
            if self._rest < math.inf or self._endings:
                needed_at = time.monotonic()
            elif time.monotonic() - needed_at > LINGER:
                with self._changed:
                    if not any(line.is_open for line in self._lines):
                        self._running, self._loop = False, None
                        return
            self._rest = min(self._rest, LINGER)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._rest)
            self._wake.clear()

    async def _look_at_all(self) -> float:
        """Start a check of each line, and return the seconds until the next check; infinite if there are no lines.

        It keeps no reference to a line, because a line lives as long as its connection.
        """
        with self._changed:
            lines = [line for line in self._lines if line.is_open]
        self._tasks = {line: task for line, task in self._tasks.items() if not task.done()}
        for line in lines:
            if line not in self._tasks:
                self._tasks[line] = asyncio.create_task(self._look(line))
        await self._dismiss(lines)
        return min((line.deadlines.tick for line in lines), default=math.inf)

    async def _dismiss(self, lines: list[Line]) -> None:
        """Close the witnesses that no waiting line needs."""
        needed = {line.address for line in lines if line.quiet_for() >= line.deadlines.tick}
        for address in [address for address in self._witnesses if address not in needed]:
            await self._witnesses.pop(address).close()

    async def _look(self, line: Line) -> None:
        """Check a line for a sign of life if that is due, and cut it if there is none."""
        try:
            line.look()
            if not line.is_open:
                return
            if line.waiting_since is not None:
                await self._ask_witness(line)
            elif time.monotonic() - line.heard_at >= line.deadlines.beat:
                await _beat(line)
        except Exception:
            log.exception("could not watch a connection")
        if line.error is not None and line.is_open:
            line.close()
            log.warning("%s", line.error)
            if line.is_cut and line.has_session and line.pid is not None and line.server is not None:
                ending = asyncio.create_task(_end_session(line, line.pid, line.server))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)

    async def _ask_witness(self, line: Line) -> None:
        deadlines = line.deadlines
        if line.quiet_for() < deadlines.doubt:
            return
        witness = self._witnesses.setdefault(line.address, Witness(line.address))
        found = await witness.look(
            line.pid, line.server, opened_at=line.opened_at, within=deadlines.answer, settled=deadlines.doubt
        )
        # Check again, because the answer to the statement may have come in the meantime.
        least = {Found.SILENCE: deadlines.doubt, Found.AT_REST: deadlines.quiet, Found.AT_WORK: math.inf}
        if line.quiet_for() >= least[found]:
            line.cut()


async def _beat(line: Line) -> None:
    """Send a heartbeat on an idle connection, and cut the line if the answer does not come in time."""
    connection = line.idle_connection()
    if connection is None or not connection.lock.acquire(blocking=False):
        return
    try:
        # Add up the pauses instead of reading the clock, because this process may have been stopped for a while.
        waited, pause = 0.0, FIRST_LOOK
        if not _send(line, connection):
            return
        while not _answered(line, connection):
            if waited >= line.deadlines.answer:
                line.cut()
                # Let libpq notice the end, too.
                _answered(line, connection)
                return
            await asyncio.sleep(pause)
            waited += pause
            pause = min(2 * pause, LONGEST_LOOK)
        line.hear()
    except psycopg.Error as error:
        line.lose(error)
    finally:
        line.is_beating = False
        connection.lock.release()


def _send(line: Line, connection: psycopg.Connection[Any]) -> bool:
    with line.mutex:
        pgconn = connection.pgconn
        if (
            not line.is_open
            or pgconn.transaction_status not in CAN_ASK
            or pgconn.pipeline_status != PipelineStatus.OFF
            # A pooler would have to assign a session to the heartbeat, and may have none for a long time.
            or (line.pid is None and pgconn.transaction_status == TransactionStatus.IDLE)
        ):
            return False
        line.is_beating = True
        pgconn.send_query(HEARTBEAT)
        pgconn.flush()
        return True


def _answered(line: Line, connection: psycopg.Connection[Any]) -> bool:
    with line.mutex:
        if not line.is_open:
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


async def _end_session(line: Line, pid: int, server: Server) -> None:
    """End the session of a line that was cut, if a new connection reaches the server again. Best effort.

    Otherwise the session may hold its locks until the server's own timeouts.
    """
    ends = time.monotonic() + line.deadlines.timeout
    while time.monotonic() < ends:
        with suppress(psycopg.Error, TimeoutError, OSError):
            async with asyncio.timeout(line.deadlines.answer):
                connection = await psycopg.AsyncConnection.connect(
                    line.address, autocommit=True, prepare_threshold=None
                )
                async with connection:
                    await connection.execute(
                        "select pg_catalog.pg_terminate_backend(a.pid) from pg_catalog.pg_stat_activity as a "
                        "where a.pid = %s and extract(epoch from a.backend_start) <= %s "
                        "and extract(epoch from pg_catalog.pg_postmaster_start_time())::float8 = %s",
                        [pid, line.opened_at, server[0]],
                    )
            return
        await asyncio.sleep(line.deadlines.tick)


WATCH = Watch()


os.register_at_fork(after_in_child=WATCH.forget)


def watch(line: Line) -> None:
    """Watch a line in this process."""
    WATCH.add(line)
