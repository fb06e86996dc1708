"""One client's connection to the relay: moves the bytes of its session and limits its memory and time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from airflow_pgchange.errors import ClientRefused, InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.topology import replies
from airflow_pgchange.topology.auth import NOT_PROVED
from airflow_pgchange.topology.catalogue import Lacking
from airflow_pgchange.topology.encryption import Encryption
from airflow_pgchange.topology.listening import keep_alive
from airflow_pgchange.topology.protocol import Send, Session, State, Wish
from airflow_pgchange.topology.raft import Raft
from airflow_pgchange.topology.replies import PIECE

log = logging.getLogger(__name__)

RECORD = 8192
"""Maximum bytes of one TLS record. libpq has room for at least this number in each read. An older libpq can leave the
rest of a longer record inside the TLS library, where waiting for the socket does not find it."""
MOUTHFUL = 2048
"""Bytes that are read from one client at once, so that other clients get their turn."""
GRACE = 5.0
"""Seconds that a client has to read its last messages before its connection is aborted."""
REFUSAL = 2.0
"""Seconds that a client over the limit has to send its startup packet and receive the reason. Short, because there are
few sockets for such clients."""


@dataclass(frozen=True)
class Limits:
    """Limits of the relay's clients.

    ``startup_timeout``: time to authenticate and begin to receive the snapshot. ``wrong_password_delay``: delay of the
    error after a wrong password. ``backlog_bytes``: a client with this number of unsent bytes gets no more events until
    it reads. ``stalled_timeout``: a client that reads nothing for so long, though data waits, is disconnected.
    ``refresh_interval``: if some of the missing buckets have arrived, but not all, the minimum age of a client's snapshot
    before it gets another.
    """

    max_clients: int = 5000
    startup_timeout: Seconds = 10.0
    wrong_password_delay: Seconds = 1.0
    backlog_bytes: int = 1024 * 1024
    stalled_timeout: Seconds = 30.0
    refresh_interval: Seconds = 15.0

    def __post_init__(self) -> None:
        if self.max_clients < 1:
            raise InvalidArgument(f"a relay has room for at least 1 client, not for {self.max_clients}")


class Keeper(Protocol):
    """The owner of the connections: the relay."""

    def arrived(self, connection: Connection) -> None:
        """Handle an authenticated client, which needs a snapshot: call ``welcome`` once there is one."""

    def gone(self, connection: Connection) -> None:
        """Handle the end of a connection."""


class Connection(asyncio.BufferedProtocol):
    """One client's connection, as an asyncio protocol.

    ``progress`` is the position of the last event that was queued for the client. ``lacking`` are the buckets that its
    topology is missing.
    """

    def __init__(
        self, number: int, session: Session, keeper: Keeper, limits: Limits, encryption: Encryption | None
    ) -> None:
        self.number = number
        self.progress = Raft(0, 0)
        self.lacking: Lacking | None = None
        self._session = session
        self._keeper = keeper
        self._limits = limits
        self._encryption = encryption
        self._pieces: deque[tuple[bytes, int]] = deque()
        self._behind = 0
        self._welcomed_at = 0.0
        self._paused = False
        self._leaving = False
        self._rejected = False
        self._peer = "?"
        self._timer: asyncio.TimerHandle | None = None
        self._encrypting: asyncio.Task[None] | None = None
        # A memoryview: TLS fills slices of the buffer, and slices of a bytearray would be copies.
        self._inbox = memoryview(bytearray(MOUTHFUL))
        self._early = b""

    def __str__(self) -> str:
        who = f", user {self._session.user!r:.100}" if self._session.user else ""
        return f"client {self.number} ({self._peer}{who})"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._take(cast(asyncio.Transport, transport), PIECE)
        peer = transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local"
        keep_alive(transport.get_extra_info("socket"))
        startup = seconds("startup_timeout", self._limits.startup_timeout)
        self._after(min(startup, REFUSAL) if self._session.is_refused else startup, self._late)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._inbox[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._rejected:
            return
        if self._encrypting is not None:
            # asyncio delivers the first decrypted bytes before start_tls() returns the transport that can answer them.
            self._early += data
        else:
            self._follow(self._session.receive(data))

    @property
    def is_due(self) -> bool:
        """Whether the client's snapshot is older than ``refresh_interval``."""
        age = asyncio.get_running_loop().time() - self._welcomed_at
        return age >= seconds("refresh_interval", self._limits.refresh_interval)

    @property
    def takes(self) -> bool:
        """Whether to send the client more events: it is not leaving, and its backlog is below the limit."""
        return not self._leaving and self._behind < self._limits.backlog_bytes

    def pause_writing(self) -> None:
        self._paused = True
        if self._leaving:
            return
        # Read no more queries while the client does not read answers, so that the backlog stays bounded.
        self._transport.pause_reading()
        if self._session.state is State.READY:
            self._after(seconds("stalled_timeout", self._limits.stalled_timeout), self._stalled)

    def resume_writing(self) -> None:
        self._paused = False
        if self._leaving or self._rejected:
            return
        self._transport.resume_reading()
        if self._session.state is State.READY:
            self._no_timer()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leaving = True
        self._pieces.clear()
        self._no_timer()
        self._keeper.gone(self)
        log.debug("%s: ended: %s", self, exc or "by the client")

    def go_on(self) -> None:
        """Continue the authentication of a client that waited for the catalogue's secret."""
        self._follow(self._session.go_on())

    def welcome(self, snapshot: Sequence[bytes], progress: Raft, lacking: Lacking | None) -> None:
        """Send the snapshot. The client then gets the events after ``progress``."""
        if self._leaving:
            return
        self.progress, self.lacking = progress, lacking
        self._welcomed_at = asyncio.get_running_loop().time()
        self._no_timer()
        self._pieces.extend((piece, 0) for piece in snapshot)
        self._follow(self._session.ready())
        if self._paused:
            self.pause_writing()

    def offer(self, pieces: Iterable[bytes]) -> None:
        """Queue data for the client, and send it as soon as the client reads."""
        if self._leaving:
            return
        for piece in pieces:
            self._pieces.append((piece, len(piece)))
            self._behind += len(piece)
        self._flush()

    def refuse(self, refusal: ClientRefused, level: int = logging.WARNING) -> None:
        """Send the client the error, log it, and close the connection."""
        if self._leaving:
            return
        log.log(level, "%s: disconnected: %s", self, _in_one_line(str(refusal)))
        self._pieces.clear()
        self._transport.write(replies.error(refusal.sqlstate, str(refusal), refusal.hint, fatal=True))
        self._leave()

    def _follow(self, steps: Iterable[Send | Wish]) -> None:
        """Carry out the steps of the session until it ends.

        Consecutive sends are joined into one write, because each write costs a system call.
        """
        if self._leaving:
            return
        output = list[bytes]()
        try:
            for step in steps:
                if isinstance(step, Send):
                    output.append(step.data)
                    continue
                self._send(output)
                if step is Wish.REGISTER:
                    self._keeper.arrived(self)
                elif step is Wish.ENCRYPT:
                    self._transport.pause_reading()
                    self._encrypting = asyncio.get_running_loop().create_task(self._encrypt())
                else:
                    self._leave()
                if self._leaving:
                    return
            self._send(output)
        except ClientRefused as refusal:
            self._send(output)
            if refusal.sqlstate == NOT_PROVED:
                self._reject(refusal)
            else:
                self.refuse(refusal)

    def _reject(self, refusal: ClientRefused) -> None:
        """Refuse a wrong password after a delay, to slow down guessing. Other clients do not wait meanwhile."""
        self._rejected = True
        self._transport.pause_reading()
        delay = seconds("wrong_password_delay", self._limits.wrong_password_delay)
        self._after(delay, lambda: self.refuse(refusal))

    def _send(self, output: list[bytes]) -> None:
        if output:
            self.offer([b"".join(output)])
            output.clear()

    async def _encrypt(self) -> None:
        if self._encryption is None or self._leaving:
            return
        plain, loop = self._transport, asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                plain,
                self,
                self._encryption.context,
                server_side=True,
                ssl_handshake_timeout=seconds("startup_timeout", self._limits.startup_timeout),
            )
        except OSError as error:
            log.warning("%s: disconnected: TLS failed: %s", self, str(error) or "it ended the connection")
            # Break the reference cycle of the error and its future, which would keep the TLS buffers alive.
            error.__traceback__ = None
            encrypted = None
        if encrypted is None:
            plain.abort()
            self.connection_lost(None)
        else:
            self._take(encrypted, RECORD)
            self._encrypting = None
            self.data_received(self._early)

    def _take(self, transport: asyncio.Transport, most: int) -> None:
        """Use this transport from now on, with at most ``most`` bytes in one write."""
        self._transport, self._most = transport, most
        transport.set_write_buffer_limits(high=PIECE)

    def _flush(self) -> None:
        while self._pieces and not self._paused:
            piece, counted = self._pieces.popleft()
            self._behind -= counted
            for start in range(0, len(piece), self._most):
                self._transport.write(piece[start : start + self._most])

    def _leave(self) -> None:
        self._leaving = True
        self._transport.close()
        self._after(GRACE, self._transport.abort)

    def _late(self) -> None:
        if self._session.state in (State.HELD, State.WAITING):
            self.refuse(ClientRefused("57P03", "the catalogue cannot be reached now", "try again later"))
        else:
            self.refuse(ClientRefused("08006", "too slow to say who it is"))

    def _stalled(self) -> None:
        self.refuse(ClientRefused("53400", "too slow: it takes nothing", "connect again"))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``seconds``. A connection has one timer: this replaces the previous one."""
        self._no_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, action)

    def _no_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _in_one_line(text: str) -> str:
    """Escape control characters, so that a client cannot forge lines of the log."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:500])
