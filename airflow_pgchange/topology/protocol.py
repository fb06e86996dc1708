"""The server's side of the PostgreSQL protocol for one client. No I/O, so that tests can feed it any bytes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from airflow_pgchange.errors import ClientRefused
from airflow_pgchange.topology import replies
from airflow_pgchange.topology.auth import Exchange, Users
from airflow_pgchange.topology.frames import CANCEL, SSL, Fields, Frames, PrestartRequest, Startup, text
from airflow_pgchange.topology.queries import Queries
from airflow_pgchange.topology.startup_options import check_word

EARLY = 2048
"""Maximum bytes that a client may send before it has its snapshot. Few, because they are then answered all at once."""


@dataclass(frozen=True)
class Send:
    """Bytes to send to the client."""

    data: bytes


class Wish(Enum):
    """Requests of a session to its connection, besides sending bytes."""

    ENCRYPT = auto()
    """Start TLS once the bytes so far are sent."""
    REGISTER = auto()
    """The client is authenticated: send it the snapshot, call ``ready()``, then send it the events."""
    LEAVE = auto()
    """The client ended the session: close the connection."""


class State(Enum):
    """The states of a session, in order. HELD waits for the catalogue's secret; WAITING waits for the snapshot."""

    STARTUP = auto()
    HELD = auto()
    PROVING = auto()
    PROVED = auto()
    WAITING = auto()
    READY = auto()


class Session:
    """The protocol state of one client.

    ``users``: None accepts every client without a password. ``encrypts``: TLS is available; ``demands``: TLS is required;
    ``binding``: the channel binding data of the certificate. ``refusal``: refuse this client after its startup packet,
    the earliest moment at which it understands an error.
    """

    def __init__(
        self,
        number: int,
        users: Users | None,
        *,
        encrypts: bool = False,
        demands: bool = False,
        binding: bytes | None = None,
        refusal: ClientRefused | None = None,
    ) -> None:
        self.user = ""
        self.state = State.STARTUP
        self._number = number
        self._users = users
        self._encrypts = encrypts
        self._demands = demands
        self._binding = binding
        self._refusal = refusal
        self._encrypted = False
        self._frames = Frames()
        self._queries = Queries()
        self._exchange: Exchange | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the client will be refused after its startup packet."""
        return self._refusal is not None

    def receive(self, data: bytes) -> Iterator[Send | Wish]:
        """Process bytes of the client and yield the next steps. Raises ClientRefused if the connection must end."""
        self._frames.feed(data)
        while True:
            if self.state is State.STARTUP:
                packet = self._frames.startup()
                if packet is None:
                    return
                yield from (
                    self._answer_prestart(packet)
                    if isinstance(packet, PrestartRequest)
                    else self._begin(packet)
                )
            elif self.state in (State.HELD, State.WAITING):
                if len(self._frames) > EARLY:
                    raise ClientRefused("08P01", f"more than {EARLY} bytes before the snapshot was sent")
                return
            else:
                message = self._frames.message()
                if message is None:
                    return
                yield from self._message(*message)

    def ready(self) -> Iterator[Send | Wish]:
        """Tell the client that its snapshot is complete, and answer queries that it sent meanwhile."""
        self.state = State.READY
        yield Send(replies.READY)
        yield from self.receive(b"")

    def go_on(self) -> Iterator[Send | Wish]:
        """Continue if the client waits for the catalogue's secret: request its password."""
        if self.state is State.HELD:
            yield from self._ask()
            yield from self.receive(b"")

    def _answer_prestart(self, packet: PrestartRequest) -> Iterator[Send | Wish]:
        if packet.code == CANCEL:
            yield Wish.LEAVE
            return
        if len(self._frames):
            # A man in the middle may have injected these bytes before TLS protects the connection (CVE-2021-23214).
            raise ClientRefused("08P01", "bytes between a request for encryption and its answer")
        if packet.code == SSL and self._encrypts and not self._encrypted:
            self._encrypted = True
            yield Send(b"S")
            yield Wish.ENCRYPT
        else:
            yield Send(b"N")

    def _begin(self, packet: Startup) -> Iterator[Send | Wish]:
        if self._refusal is not None:
            raise self._refusal
        if self._demands and not self._encrypted:
            raise ClientRefused(
                "28000",
                "this server takes encrypted connections only",
                "connect with sslmode=require, or a stricter one",
            )
        check_word(packet.parameters)
        self.user = packet.parameters.get("user", "")
        if not self.user:
            raise ClientRefused("28000", "a startup packet without a user")
        unknown = [name for name in packet.parameters if name.startswith("_pq_.")]
        if packet.minor or unknown:
            yield Send(replies.negotiate(unknown))
        if self._users is None:
            yield from self._register()
        elif self._users.is_ready:
            yield from self._ask()
        else:
            self.state = State.HELD

    def _ask(self) -> Iterator[Send | Wish]:
        assert self._users is not None
        self.state = State.PROVING
        self._exchange = Exchange(self._users, self.user, self._binding if self._encrypted else None)
        yield Send(replies.sasl(self._exchange.mechanisms))

    def _message(self, kind: bytes, body: bytes) -> Iterator[Send | Wish]:
        if kind == b"X":
            yield Wish.LEAVE
        elif self.state is State.READY:
            yield Send(self._queries.answer(kind, body))
        elif kind != b"p" or self._exchange is None:
            raise ClientRefused("08P01", f"a message of kind {kind!r} where a password was asked for")
        elif self.state is State.PROVING:
            fields = Fields(body)
            mechanism = fields.string()
            first = fields.take(fields.int32())
            fields.end()
            self.state = State.PROVED
            yield Send(replies.sasl_continue(self._exchange.first(mechanism, text(first))))
        else:
            yield Send(replies.sasl_final(self._exchange.final(text(body))))
            yield from self._register()

    def _register(self) -> Iterator[Send | Wish]:
        self.state = State.WAITING
        yield Send(replies.authenticated(self._number & 0x7FFFFFFF, secrets.randbits(31)))
        yield Wish.REGISTER
