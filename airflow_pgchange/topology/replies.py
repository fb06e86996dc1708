"""The protocol messages that the relay sends, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PIECE = 65_536
"""Maximum bytes of one write to the socket."""

STATUS = {
    "server_version": "15.0",
    "server_encoding": "UTF8",
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "integer_datetimes": "on",
    "standard_conforming_strings": "on",
    "TimeZone": "UTC",
}


@dataclass(frozen=True)
class Column:
    """The only column of a result, with its only value in the text and in the binary format."""

    name: str
    type: int
    text: bytes
    binary: bytes


ONE = Column("?column?", 23, b"1", struct.pack("!i", 1))
VOID = Column("pg_advisory_unlock_all", 2278, b"", b"")


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def _fields(severity: str, sqlstate: str, message: str, hint: str | None = None) -> bytes:
    fields = {"S": severity, "V": severity, "C": sqlstate, "M": message, "H": hint}
    return b"".join(name.encode() + text(value) for name, value in fields.items() if value) + b"\0"


def notice(text: str) -> bytes:
    return message(b"N", _fields("NOTICE", "00000", text))


def error(sqlstate: str, text: str, hint: str | None = None, *, fatal: bool = False) -> bytes:
    return message(b"E", _fields("FATAL" if fatal else "ERROR", sqlstate, text, hint))


def negotiate(unknown: Sequence[str]) -> bytes:
    """Offer protocol 3.0 without the extensions that the client requested."""
    body = struct.pack("!II", 3 << 16, len(unknown)) + b"".join(text(name) for name in unknown)
    return message(b"v", body)


def sasl(mechanisms: Iterable[str]) -> bytes:
    return message(b"R", struct.pack("!I", 10) + b"".join(text(name) for name in mechanisms) + b"\0")


def sasl_continue(data: str) -> bytes:
    return message(b"R", struct.pack("!I", 11) + data.encode())


def sasl_final(data: str) -> bytes:
    return message(b"R", struct.pack("!I", 12) + data.encode())


def authenticated(number: int, secret: int) -> bytes:
    """AuthenticationOk, the parameters, and a key for cancel requests, which the relay ignores."""
    status = b"".join(message(b"S", text(name) + text(value)) for name, value in STATUS.items())
    return message(b"R", struct.pack("!I", 0)) + status + message(b"K", struct.pack("!II", number, secret))


READY = message(b"Z", b"I")
EMPTY = message(b"I")
PARSED = message(b"1")
BOUND = message(b"2")
CLOSED = message(b"3")
NO_DATA = message(b"n")
NO_PARAMETERS = message(b"t", struct.pack("!H", 0))


def described(column: Column, format: int = 0) -> bytes:
    return message(
        b"T",
        struct.pack("!H", 1) + text(column.name) + struct.pack("!IHIhih", 0, 0, column.type, 4, -1, format),
    )


def row(column: Column, format: int = 0) -> bytes:
    value = column.binary if format else column.text
    return message(b"D", struct.pack("!HI", 1, len(value)) + value)


def complete(tag: str) -> bytes:
    return message(b"C", text(tag))


def cut(messages: Iterable[bytes]) -> list[bytes]:
    """Join whole messages to pieces of at most ``PIECE`` bytes. A longer message is a piece by itself."""
    pieces, piece, size = [], list[bytes](), 0
    for message in messages:
        if piece and size + len(message) > PIECE:
            pieces.append(b"".join(piece))
            piece, size = [], 0
        piece.append(message)
        size += len(message)
    return [*pieces, b"".join(piece)] if piece else pieces
