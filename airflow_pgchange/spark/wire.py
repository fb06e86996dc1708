"""What a task and a fork server say to each other: one application with the file for its output, and its exit code."""

from __future__ import annotations

import socket
import struct

LOCK = "lock"
"""The file, beside the sockets, that whoever connects or takes a socket away holds a lock on."""
_SIZE = struct.Struct("!Q")
_CODE = struct.Struct("!i")


def send(connection: socket.socket, message: bytes, output: int) -> None:
    """Hand over a message and an open file."""
    socket.send_fds(connection, [_SIZE.pack(len(message))], [output])
    connection.sendall(message)


def receive(connection: socket.socket) -> tuple[bytes, int]:
    """The message and the open file. Raises EOFError where whoever sends is gone."""
    head, files, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
    if len(head) < _SIZE.size or not files:
        raise EOFError
    (size,) = _SIZE.unpack(head)
    return _exactly(connection, size), files[0]


def tell(connection: socket.socket, code: int) -> None:
    """Send the exit code, if there is still somebody to hear it."""
    try:
        connection.sendall(_CODE.pack(code))
    except OSError:
        return


def told(connection: socket.socket) -> int:
    """The exit code. Raises EOFError where whoever was to tell it is gone."""
    (code,) = _CODE.unpack(_exactly(connection, _CODE.size))
    return int(code)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
