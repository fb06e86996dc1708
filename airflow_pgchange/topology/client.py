"""A client of the relay: keeps a ``Topology`` up to date over one connection."""

from __future__ import annotations

import logging
import random
import select
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from psycopg import errors, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange.feeds.connect import complete
from airflow_pgchange.feeds.errors import InvalidArgument, ServerUnavailable
from airflow_pgchange.topology.events import Event, parse
from airflow_pgchange.topology.state import Topology

log = logging.getLogger(__name__)

WORD = "-c smart_connector=0.1"
PATIENCE = 30.0
"""Seconds in which a snapshot must be there, all of it."""
RETRY = (0.1, 5.0)
"""Seconds until a lost relay is tried again: at first, and at most."""


class TopologyClient:
    """Hears of the topology from a relay, or from one of several that ``conninfo`` names.

        with TopologyClient("host=relay port=4327 user=ann password=...") as client:
            client.topology.master("default", 42)

    One thread connects, receives and follows; any may ask ``topology``, and stop it.
    """

    def __init__(self, conninfo: str, topology: Topology | None = None) -> None:
        self.topology = Topology() if topology is None else topology
        self._conninfo = _asking(conninfo)
        self._pgconn: pq.abc.PGconn | None = None
        self._heard: list[Event] = []
        self._farewell = ""
        self._stopped = False
        self._wake, self._waker = socket.socketpair()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Connect, and replace the picture by a new whole snapshot. Raises ServerUnavailable, and keeps the old picture,
        where no relay answers or its snapshot ends early."""
        self._disconnect()
        self._farewell = ""
        pgconn = pq.PGconn.connect_start(self._conninfo.encode())
        pgconn.notice_handler = self._hear
        try:
            self._establish(pgconn)
        except BaseException:
            pgconn.finish()
            raise
        self._pgconn = pgconn
        snapshot, self._heard = self._heard, []
        self.topology.load(snapshot)

    def receive(self, timeout: float | None = None) -> list[Event]:
        """Wait for events, apply them, and return those that were news; none where ``timeout`` seconds have passed, or
        somebody stopped the client. Raises ServerUnavailable where the connection is lost: ``connect`` again."""
        if self._pgconn is None:
            raise ServerUnavailable("the client is not connected to a relay: call connect()")
        until = None if timeout is None else time.monotonic() + timeout
        while not self._stopped:
            news = [event for event in self._take() if self.topology.apply(event)]
            if news:
                return news
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            due = self.topology.due_in()
            waits = [seconds for seconds in (left, due) if seconds is not None]
            ready = self._await(self._pgconn.socket, seconds=min(waits, default=None))
            if ready:
                self._consume(self._pgconn)
            self.topology.rebuild_if_due()
        return []

    def follow(self, told: Callable[[list[Event]], None] | None = None) -> None:
        """Keep the picture up to date until ``stop``, connecting again whenever the relay is lost; ``told`` is called
        with what was news, and with nothing after a new snapshot."""
        pause = RETRY[0]
        while not self._stopped:
            try:
                if self._pgconn is None:
                    self.connect()
                    if told is not None:
                        told([])
                pause = RETRY[0]
                news = self.receive()
                if news and told is not None:
                    told(news)
            except ServerUnavailable as error:
                log.info("%s; trying again", error)
                # Not all clients of a relay that was lost at the same moment.
                select.select([self._wake], [], [], random.uniform(0, pause))
                pause = min(2 * pause, RETRY[1])

    def stop(self) -> None:
        """End ``receive`` and ``follow``; from any thread, or a signal's handler."""
        self._stopped = True
        self._waker.send(b"\0")

    def close(self) -> None:
        """Leave the relay. What is known of the topology stays."""
        self._disconnect()
        self._wake.close()
        self._waker.close()

    def _establish(self, pgconn: pq.abc.PGconn) -> None:
        """Wait until the relay is ready for queries: all notices before that are the snapshot."""
        until = time.monotonic() + PATIENCE
        while True:
            if pgconn.status == pq.ConnStatus.BAD:
                raise ServerUnavailable(
                    f"{pgconn.get_error_message().strip()}: check the relay, and try again"
                )
            step = pgconn.connect_poll()
            if step == pq.PollingStatus.OK:
                return
            if step == pq.PollingStatus.FAILED:
                continue
            left = until - time.monotonic()
            writing = step == pq.PollingStatus.WRITING
            if left <= 0 or not (self._await(pgconn.socket, writing=writing, seconds=left) or self._stopped):
                raise ServerUnavailable(f"the relay sent no whole snapshot within {PATIENCE:g} s: try again")
            if self._stopped:
                raise ServerUnavailable("the client was stopped while it connected")

    def _await(self, sock: int, *, writing: bool = False, seconds: float | None) -> bool:
        """Wait until the relay's socket can be read, or written; not where the time is over or somebody stops us."""
        mine = self._wake.fileno()
        reads, writes = ([mine], [sock]) if writing else ([mine, sock], [])
        readable, writable, _ = select.select(reads, writes, [], seconds)
        return sock in readable or sock in writable

    def _hear(self, notice: pq.abc.PGresult) -> None:
        said = _field(notice, pq.DiagnosticField.MESSAGE_PRIMARY)
        if _field(notice, pq.DiagnosticField.SEVERITY) != "NOTICE":
            self._farewell = said
        elif (event := parse(said)) is not None:
            self._heard.append(event)
        else:
            log.warning("the relay sent a notice that is no event: %.200s", said)

    def _consume(self, pgconn: pq.abc.PGconn) -> None:
        """Read what has come. libpq takes notices apart when it is asked whether it is busy."""
        try:
            pgconn.consume_input()
            pgconn.is_busy()
        except errors.OperationalError as error:
            pgconn.is_busy()
            reason = self._farewell or str(error).strip()
            self._disconnect()
            raise ServerUnavailable(f"the relay ended the connection: {reason}: connect again") from error

    def _take(self) -> list[Event]:
        heard, self._heard = self._heard, []
        return heard

    def _disconnect(self) -> None:
        pgconn, self._pgconn = self._pgconn, None
        self._heard = []
        if pgconn is not None:
            pgconn.finish()


def _asking(conninfo: str) -> str:
    """``conninfo`` with the word that asks for topology among its options."""
    try:
        given = conninfo_to_dict(complete(conninfo))
    except errors.ProgrammingError as error:
        raise InvalidArgument(
            f"{str(error).strip()}; write it as 'host=... port=... user=...' or as postgresql://..."
        ) from None
    return make_conninfo("", **{**given, "options": f"{given.get('options') or ''} {WORD}".strip()})


def _field(notice: pq.abc.PGresult, field: pq.DiagnosticField) -> str:
    value = notice.error_field(field)
    return "" if value is None else value.decode("utf-8", "replace")
