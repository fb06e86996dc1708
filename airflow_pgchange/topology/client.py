"""A client of the relay: keeps a ``Topology`` up to date over one connection."""

from __future__ import annotations

import logging
import random
import re
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from psycopg import errors, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable
from airflow_pgchange.feeds import silence
from airflow_pgchange.feeds.checks import Seconds, patience
from airflow_pgchange.feeds.connections import complete
from airflow_pgchange.topology.events import Event, parse
from airflow_pgchange.topology.servers import servers
from airflow_pgchange.topology.state import Topology

log = logging.getLogger(__name__)

WORD = "-c smart_connector=0.1"
PATIENCE = 15.0
"""Seconds in which a relay must say something while it is connected to, where the connection string has no other
``connect_timeout``: longer than a relay waits for its catalogue before it says so."""
HOSTS, PORTS = re.compile("@?[^@,]*(,@?[^@,]*)*"), re.compile("[0-9, ]*")
"""In a URL a part of a password that has a / or @ in it is taken for one of them."""
RETRY = (0.1, 5.0)
"""Seconds until a lost relay is tried again: at first, and at most."""


class TopologyClient:
    """Hears of the topology from a relay, or from the first of several that ``conninfo`` names which answers.

        with TopologyClient("host=relay port=4327 user=ann password=...") as client:
            client.topology.master("default", 42)

    One thread connects, receives and follows; any may ask ``topology``, and stop it.
    """

    def __init__(self, conninfo: str, topology: Topology | None = None) -> None:
        self.topology = Topology() if topology is None else topology
        self._given = _asking(conninfo)
        self._patience = _patience(self._given)
        self._deadlines = silence.deadlines(make_conninfo("", **self._given))
        self._heard_at = self._asked_at = 0.0
        self._pgconn: pq.abc.PGconn | None = None
        self._heard: list[Event] = []
        self._farewell = ""
        self._stopped = False
        self._wake, self._waker = socket.socketpair()

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Connect, and replace the picture by a new whole snapshot. Raises ServerUnavailable, and keeps the old picture,
        where no relay answers or its snapshot ends early."""
        self._disconnect()
        reasons = []
        for server in servers(self._given):
            try:
                self._pgconn = self._connected(server)
            except ServerUnavailable as error:
                reasons.append(str(error))
            else:
                self.topology.load(self._take())
                return
            if self._stopped:
                break
        raise ServerUnavailable("; ".join(dict.fromkeys(reasons)))

    def receive(self, timeout: Seconds | None = None) -> list[Event]:
        """Wait for events, apply them, and return those that were news; none where ``timeout`` has passed, or
        somebody stopped the client. Raises ServerUnavailable where the connection is lost: ``connect`` again."""
        if self._pgconn is None:
            raise ServerUnavailable("the client is not connected to a relay: call connect()")
        limit = patience("timeout", timeout)
        until = None if limit is None else time.monotonic() + limit
        while not self._stopped:
            news = [event for event in self._take() if self.topology.apply(event)]
            if news:
                return news
            left = None if until is None else until - time.monotonic()
            due = self.topology.due_in()
            waits = [seconds for seconds in (left, due, self._next_beat()) if seconds is not None]
            ready = self._await(self._pgconn.socket, seconds=max(0, min(waits)) if waits else None)
            if ready:
                self._consume(self._pgconn)
            else:
                self._beat(self._pgconn)
            self.topology.rebuild_if_due()
            # Not before: who waits for no time at all is to hear of what is there.
            if not ready and left is not None and left <= 0:
                break
        return []

    def follow(self, on_events: Callable[[list[Event]], None] | None = None) -> None:
        """Keep the picture up to date until ``stop``, connecting again whenever the relay is lost; ``on_events``
        is called with the new events, and with no events after a new snapshot. The reason why no relay can be reached is
        logged once."""
        pause, logged = RETRY[0], ""
        while not self._stopped:
            connected = self._pgconn is not None
            try:
                if not connected:
                    self.connect()
                news = self.receive() if connected else []
                pause, logged = RETRY[0], ""
                if on_events is not None and (news or not connected):
                    on_events(news)
            except ServerUnavailable as error:
                if connected:
                    log.info("%s", error)
                elif str(error) != logged and not self._stopped:
                    log.warning("%s; trying again", error)
                    logged = str(error)
                # Not all clients of a relay that was lost at the same moment.
                self._await(None, seconds=random.uniform(0, pause))
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

    def _connected(self, server: str) -> pq.abc.PGconn:
        """A connection to one server, whose snapshot has been heard. Raises ServerUnavailable."""
        self._heard, self._farewell = [], ""
        pgconn = pq.PGconn.connect_start(silence.for_libpq(server).encode())
        pgconn.notice_handler = self._hear
        try:
            self._establish(pgconn)
        except BaseException:
            pgconn.finish()
            raise
        return pgconn

    def _establish(self, pgconn: pq.abc.PGconn) -> None:
        """Wait until the relay is ready for queries: all notices before that are the snapshot."""
        while True:
            if pgconn.status == pq.ConnStatus.BAD:
                raise ServerUnavailable(
                    f"{pgconn.get_error_message().strip()}: check the relay, and try again"
                )
            step = pgconn.connect_poll()
            if step == pq.PollingStatus.OK:
                self._heard_at, self._asked_at = time.monotonic(), 0.0
                return
            if step == pq.PollingStatus.FAILED:
                continue
            writing = step == pq.PollingStatus.WRITING
            there = self._await(pgconn.socket, writing=writing, seconds=self._patience)
            if self._stopped:
                raise ServerUnavailable("the client was stopped while it connected")
            if not there:
                raise ServerUnavailable(
                    f"{pgconn.host.decode()} port {pgconn.port.decode()} said nothing for {self._patience:g} s and its "
                    "snapshot is not whole: check the relay, and try again"
                )

    def _await(self, sock: int | None, *, writing: bool = False, seconds: float | None) -> bool:
        """Wait until the relay's socket can be read, or written; not where the time is over or somebody stops us."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            if sock is not None:
                selector.register(sock, selectors.EVENT_WRITE if writing else selectors.EVENT_READ)
            return sock in [key.fd for key, _ in selector.select(seconds)]

    def _hear(self, notice: pq.abc.PGresult) -> None:
        said = _field(notice, pq.DiagnosticField.MESSAGE_PRIMARY)
        if _field(notice, pq.DiagnosticField.SEVERITY) != "NOTICE":
            self._farewell = said
        elif (event := parse(said)) is not None:
            self._heard.append(event)
        else:
            log.warning("the relay sent a notice that is not an event: %.200s", said)

    def _consume(self, pgconn: pq.abc.PGconn) -> None:
        """Read what has come. libpq takes notices apart when it is asked whether it is busy."""
        self._heard_at, self._asked_at = time.monotonic(), 0.0
        try:
            pgconn.consume_input()
            # What a heartbeat gets for an answer.
            while not pgconn.is_busy() and pgconn.get_result() is not None:
                pass
        except errors.OperationalError as error:
            pgconn.is_busy()
            reason = self._farewell or str(error).strip()
            self._disconnect()
            raise ServerUnavailable(f"the relay ended the connection: {reason}: connect again") from error

    def _next_beat(self) -> float | None:
        """Seconds until the relay is sent a heartbeat, or must have answered it; None where it may be silent for ever."""
        if self._deadlines is None:
            return None
        now = time.monotonic()
        if self._asked_at:
            return self._asked_at + self._deadlines.answer - now
        return self._heard_at + self._deadlines.beat - now

    def _beat(self, pgconn: pq.abc.PGconn) -> None:
        """Send the relay an empty query if nothing has come for long. Raises ServerUnavailable where it does not answer:
        nothing else tells that a relay is gone behind a proxy that keeps the connection."""
        due = self._next_beat()
        if due is None or due > 0:
            return
        try:
            if not self._asked_at:
                pgconn.send_query(b"")
                pgconn.flush()
                self._asked_at = time.monotonic()
                return
        except errors.OperationalError as error:
            self._disconnect()
            raise ServerUnavailable(
                f"the relay cannot be asked: {str(error).strip()}: connect again"
            ) from error
        quiet = time.monotonic() - self._heard_at
        self._disconnect()
        raise ServerUnavailable(
            f"the relay gave no sign of life for {quiet:.3g} s (tcp_user_timeout): check it, and connect again"
        )

    def _take(self) -> list[Event]:
        heard, self._heard = self._heard, []
        return heard

    def _disconnect(self) -> None:
        pgconn, self._pgconn = self._pgconn, None
        self._heard = []
        if pgconn is not None:
            pgconn.finish()


def _asking(conninfo: str) -> Mapping[str, Any]:
    """``conninfo`` with the word that asks for topology among its options."""
    try:
        said = {"connect_timeout": int(PATIENCE), **conninfo_to_dict(conninfo)}
        readable = HOSTS.fullmatch(str(said.get("host", ""))) and PORTS.fullmatch(str(said.get("port", "")))
    except errors.ProgrammingError:
        readable = None
    if not readable:
        # What libpq says of it quotes it, and may quote the password.
        raise InvalidArgument(
            "the connection string cannot be read: write it as 'host=... port=... user=...', a value with blanks within "
            "single quotes, or as postgresql://..., where a % that means itself is %25, a / %2F and a @ %40"
        )
    said["options"] = f"{said.get('options') or ''} {WORD}".strip()
    return conninfo_to_dict(complete(make_conninfo("", **said)))


def _patience(given: Mapping[str, Any]) -> float | None:
    """Seconds that a server may be silent; None for ever, which libpq writes as no positive number."""
    try:
        seconds = float(given["connect_timeout"])
    except ValueError:
        raise InvalidArgument(
            f"connect_timeout is {given['connect_timeout']!r}: write a number of seconds"
        ) from None
    return seconds if seconds > 0 else None


def _field(notice: pq.abc.PGresult, field: pq.DiagnosticField) -> str:
    value = notice.error_field(field)
    return "" if value is None else value.decode("utf-8", "replace")
