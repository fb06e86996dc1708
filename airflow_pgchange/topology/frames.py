"""Split the bytes of a client into protocol messages. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from airflow_pgchange.errors import ClientRefused

LONGEST_STARTUP = 10_000
"""Maximum bytes of a startup packet: PostgreSQL's own limit."""
LONGEST_MESSAGE = 65_536
"""Maximum bytes of any later message. Clients of the relay send only short queries."""

LONGEST_NAME = 63
"""Maximum bytes of the name of a prepared statement or portal: PostgreSQL's limit for identifiers."""

MAJOR = 3
CANCEL, SSL, GSS = 80877102, 80877103, 80877104
INT32 = struct.Struct("!I")
KINDS = frozenset(b"BCDEFHPQSXcdfp")


@dataclass(frozen=True)
class PrestartRequest:
    """A request before the startup packet, or instead of it: ``CANCEL``, ``SSL`` or ``GSS``."""

    code: int


@dataclass(frozen=True)
class Startup:
    """A startup packet: the protocol's minor version and the client's parameters."""

    minor: int
    parameters: Mapping[str, str]


class Frames:
    """Buffers the bytes of one client and returns whole messages.

    Raises ClientRefused for an unknown or too long message as soon as its header is there, before its body is buffered.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Return the number of buffered bytes."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def startup(self) -> PrestartRequest | Startup | None:
        """Return the next packet before authentication; None until it is complete."""
        body = self._cut(0, 8, LONGEST_STARTUP)
        return None if body is None else parse_startup(body)

    def message(self) -> tuple[bytes, bytes] | None:
        """Return the type byte and the body of the next message after the startup; None until it is complete."""
        if self._buffer and self._buffer[0] not in KINDS:
            raise ClientRefused("08P01", f"a message of the unknown kind {bytes(self._buffer[:1])!r}")
        kind = bytes(self._buffer[:1])
        body = self._cut(1, 4, LONGEST_MESSAGE)
        return None if body is None else (kind, body)

    def _cut(self, skip: int, least: int, most: int) -> bytes | None:
        if len(self._buffer) < skip + 4:
            return None
        (length,) = INT32.unpack_from(self._buffer, skip)
        if not least <= length <= most:
            raise ClientRefused(
                "08P01", f"a message of {length} bytes: this server takes from {least} to {most}"
            )
        if len(self._buffer) < skip + length:
            return None
        body = bytes(self._buffer[skip + 4 : skip + length])
        del self._buffer[: skip + length]
        return body


def parse_startup(body: bytes) -> PrestartRequest | Startup:
    """Parse a packet before authentication, without its length. Raises ClientRefused if it is malformed."""
    (version,) = INT32.unpack_from(body)
    if version in (CANCEL, SSL, GSS):
        return PrestartRequest(version)
    major, minor = version >> 16, version & 0xFFFF
    if major != MAJOR:
        raise ClientRefused("0A000", f"protocol {major}.{minor} is not supported: use {MAJOR}.0")
    if body[4:] == b"\0":
        return Startup(minor, {})
    if not body.endswith(b"\0\0"):
        raise ClientRefused("08P01", "a startup packet without its terminating zero bytes")
    words = [text(word) for word in body[4:-2].split(b"\0")]
    if len(words) % 2 or not all(words[::2]):
        raise ClientRefused("08P01", "a startup packet whose parameters are not pairs of name and value")
    return Startup(minor, dict(zip(words[::2], words[1::2], strict=True)))


def text(data: bytes) -> str:
    """Decode UTF-8. Raises ClientRefused if the bytes are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ClientRefused("22021", "a text that is not UTF-8, the only encoding of this server") from error


class Fields:
    """Reads the fields of one message in order. Raises ClientRefused if there are fewer or more than expected."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def string(self) -> str:
        return text(self._terminated())

    def name(self) -> str:
        name = self._terminated()
        if len(name) > LONGEST_NAME:
            raise ClientRefused(
                "42622", f"a name of {len(name)} bytes: this server takes up to {LONGEST_NAME}"
            )
        return text(name)

    def _terminated(self) -> bytes:
        end = self._body.find(b"\0", self._at)
        if end < 0:
            raise _cut_short()
        value, self._at = self._body[self._at : end], end + 1
        return value

    def take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._body):
            raise _cut_short()
        self._at += count
        return self._body[self._at - count : self._at]

    def int16(self) -> int:
        return int.from_bytes(self.take(2), signed=True)

    def int32(self) -> int:
        return int.from_bytes(self.take(4), signed=True)

    def int16s(self) -> list[int]:
        """Read a count and that many numbers."""
        return [self.int16() for _ in range(self.int16())]

    def end(self) -> None:
        if self._at != len(self._body):
            raise ClientRefused("08P01", "a message with more fields than it may have")


def _cut_short() -> ClientRefused:
    return ClientRefused("08P01", "a message with fewer fields than it must have")
