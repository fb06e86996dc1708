"""A client of the relay that keeps a ``Topology`` up to date over one connection."""

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
from airflow_pgchange.feeds import server_timeout
from airflow_pgchange.feeds.argument_checks import Seconds, patience
from airflow_pgchange.feeds.connections import complete
from airflow_pgchange.topology.client_state import Topology
from airflow_pgchange.topology.conninfo import servers
from airflow_pgchange.topology.events import Event, parse

log = logging.getLogger(__name__)

WORD = "-c smart_connector=0.1"
PATIENCE = 15.0
"""Default ``connect_timeout`` in seconds: how long the relay may send nothing while the client connects. It is longer
than the 10 s after which a relay reports that it cannot reach its catalogue."""
HOSTS, PORTS = re.compile("@?[^@,]*(,@?[^@,]*)*"), re.compile("[0-9, ]*")
"""Valid hosts and ports. If the password in a URL has an unescaped / or @, libpq reads a part of it as the host or
port. We refuse such values without showing them."""
RETRY = (0.1, 5.0)
"""Initial and maximum delay in seconds before the client reconnects."""


class TopologyClient:
    """Receives the topology from a relay. If ``conninfo`` names several relays, the first that answers is used.

        with TopologyClient("host=relay port=4327 user=ann password=...") as client:
            client.topology.master("default", 42)

    ``connect``, ``receive`` and ``follow`` belong to one thread. Any thread may read ``topology`` and call ``stop``.
    """

    def __init__(self, conninfo: str, topology: Topology | None = None) -> None:
        self.topology = Topology() if topology is None else topology
        self._settings = _settings(conninfo)
        self._connect_timeout = _connect_timeout(self._settings)
        self._deadlines = server_timeout.deadlines(make_conninfo("", **self._settings))
        self._received_at = self._beat_sent_at = 0.0
        self._pgconn: pq.abc.PGconn | None = None
        self._received: list[Event] = []
        self._last_error = ""
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
        """Connect, and replace the topology by a new snapshot.

        Raises ServerUnavailable and keeps the old topology if no relay answers or the snapshot is incomplete.
        """
        self._disconnect()
        reasons = []
        for server in servers(self._settings):
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
        """Wait for events, apply them, and return those that were new.

        Returns an empty list after ``timeout`` or ``stop``. Raises ServerUnavailable if the connection is lost; call
        ``connect`` then.
        """
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
            # Check the timeout only after reading, so that a timeout of 0 still returns events that have arrived.
            if not ready and left is not None and left <= 0:
                break
        return []

    def follow(self, on_events: Callable[[list[Event]], None] | None = None) -> None:
        """Keep the topology up to date until ``stop``, and reconnect whenever the relay is lost.

        ``on_events`` is called with the new events, and with an empty list after a new snapshot. If no relay can be
        reached, the reason is logged once.
        """
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
                # A random delay, so that the clients of a lost relay do not all reconnect at the same moment.
                self._await(None, seconds=random.uniform(0, pause))
                pause = min(2 * pause, RETRY[1])

    def stop(self) -> None:
        """Make ``receive`` and ``follow`` return. Safe in any thread and in a signal handler."""
        self._stopped = True
        self._waker.send(b"\0")

    def close(self) -> None:
        """Close the connection. The topology keeps its last state."""
        self._disconnect()
        self._wake.close()
        self._waker.close()

    def _connected(self, server: str) -> pq.abc.PGconn:
        """Connect to one relay and receive its whole snapshot. Raises ServerUnavailable."""
        self._received, self._last_error = [], ""
        pgconn = pq.PGconn.connect_start(server_timeout.for_libpq(server).encode())
        pgconn.notice_handler = self._on_notice
        try:
            self._establish(pgconn)
        except BaseException:
            pgconn.finish()
            raise
        return pgconn

    def _establish(self, pgconn: pq.abc.PGconn) -> None:
        """Wait until the relay is ready for queries. All notices before that are the snapshot."""
        while True:
            if pgconn.status == pq.ConnStatus.BAD:
                raise ServerUnavailable(
                    f"{pgconn.get_error_message().strip()}: check the relay, and try again"
                )
            step = pgconn.connect_poll()
            if step == pq.PollingStatus.OK:
                self._received_at, self._beat_sent_at = time.monotonic(), 0.0
                return
            if step == pq.PollingStatus.FAILED:
                continue
            writing = step == pq.PollingStatus.WRITING
            ready = self._await(pgconn.socket, writing=writing, seconds=self._connect_timeout)
            if self._stopped:
                raise ServerUnavailable("the client was stopped while it connected")
            if not ready:
                raise ServerUnavailable(
                    f"{pgconn.host.decode()} port {pgconn.port.decode()} said nothing for {self._connect_timeout:g} s "
                    "and its snapshot is not whole: check the relay, and try again"
                )

    def _await(self, sock: int | None, *, writing: bool = False, seconds: float | None) -> bool:
        """Wait until the relay's socket is readable, or writable. Return False after ``seconds`` or ``stop``."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            if sock is not None:
                selector.register(sock, selectors.EVENT_WRITE if writing else selectors.EVENT_READ)
            return sock in [key.fd for key, _ in selector.select(seconds)]

    def _on_notice(self, notice: pq.abc.PGresult) -> None:
        message = _field(notice, pq.DiagnosticField.MESSAGE_PRIMARY)
        if _field(notice, pq.DiagnosticField.SEVERITY) != "NOTICE":
            self._last_error = message
        elif (event := parse(message)) is not None:
            self._received.append(event)
        else:
            log.warning("the relay sent a notice that is not an event: %.200s", message)

    def _consume(self, pgconn: pq.abc.PGconn) -> None:
        """Read the arrived bytes and parse them. libpq parses notices inside ``is_busy``."""
        self._received_at, self._beat_sent_at = time.monotonic(), 0.0
        try:
            pgconn.consume_input()
            # Discard the results of heartbeat queries.
            while not pgconn.is_busy() and pgconn.get_result() is not None:
                pass
        except errors.OperationalError as error:
            pgconn.is_busy()
            reason = self._last_error or str(error).strip()
            self._disconnect()
            raise ServerUnavailable(f"the relay ended the connection: {reason}: connect again") from error

    def _next_beat(self) -> float | None:
        """Return the seconds until the next heartbeat is due, or until the last one must have been answered.

        None if heartbeats are turned off.
        """
        if self._deadlines is None:
            return None
        now = time.monotonic()
        if self._beat_sent_at:
            return self._beat_sent_at + self._deadlines.answer - now
        return self._received_at + self._deadlines.beat - now

    def _beat(self, pgconn: pq.abc.PGconn) -> None:
        """Send an empty query as a heartbeat when it is due. Raises ServerUnavailable if the last one was not answered.

        If a proxy keeps the connection open, only a heartbeat detects that the relay behind it is gone.
        """
        due = self._next_beat()
        if due is None or due > 0:
            return
        try:
            if not self._beat_sent_at:
                pgconn.send_query(b"")
                pgconn.flush()
                self._beat_sent_at = time.monotonic()
                return
        except errors.OperationalError as error:
            self._disconnect()
            raise ServerUnavailable(
                f"no heartbeat can be sent to the relay: {str(error).strip()}: connect again"
            ) from error
        silent = time.monotonic() - self._received_at
        self._disconnect()
        raise ServerUnavailable(
            f"the relay gave no sign of life for {silent:.3g} s (tcp_user_timeout): check it, and connect again"
        )

    def _take(self) -> list[Event]:
        received, self._received = self._received, []
        return received

    def _disconnect(self) -> None:
        pgconn, self._pgconn = self._pgconn, None
        self._received = []
        if pgconn is not None:
            pgconn.finish()


def _settings(conninfo: str) -> Mapping[str, Any]:
    """Parse ``conninfo``, with our default timeout and with the startup option that requests the topology."""
    try:
        settings = {"connect_timeout": int(PATIENCE), **conninfo_to_dict(conninfo)}
        host, port = str(settings.get("host", "")), str(settings.get("port", ""))
        readable = HOSTS.fullmatch(host) and PORTS.fullmatch(port)
    except errors.ProgrammingError:
        readable = None
    if not readable:
        # Do not pass libpq's message on: it quotes the connection string, perhaps with the password.
        raise InvalidArgument(
            "the connection string cannot be read: write it as 'host=... port=... user=...', a value with blanks within "
            "single quotes, or as postgresql://..., where a % that means itself is %25, a / %2F and a @ %40"
        )
    settings["options"] = f"{settings.get('options') or ''} {WORD}".strip()
    return conninfo_to_dict(complete(make_conninfo("", **settings)))


def _connect_timeout(settings: Mapping[str, Any]) -> float | None:
    """Return ``connect_timeout`` in seconds; None for no limit. As in libpq, 0 or less means no limit."""
    try:
        seconds = float(settings["connect_timeout"])
    except ValueError:
        raise InvalidArgument(
            f"connect_timeout is {settings['connect_timeout']!r}: write a number of seconds"
        ) from None
    return seconds if seconds > 0 else None


def _field(notice: pq.abc.PGresult, field: pq.DiagnosticField) -> str:
    value = notice.error_field(field)
    return "" if value is None else value.decode("utf-8", "replace")
