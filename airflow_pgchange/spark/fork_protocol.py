"""The messages between a task and a fork server: an application with the file for its output, and its exit code."""

from __future__ import annotations

import socket
import struct

LOCK = "lock"
"""A file beside the sockets. A process locks it to connect to a socket, or to remove a socket."""
_SIZE = struct.Struct("!Q")
_CODE = struct.Struct("!i")


def send(connection: socket.socket, message: bytes, output: int) -> None:
    """Send a message and an open file."""
    socket.send_fds(connection, [_SIZE.pack(len(message))], [output])
    connection.sendall(message)


def receive(connection: socket.socket) -> tuple[bytes, int]:
    """Return the message and the open file. Raises EOFError if the sender is gone."""
    head, files, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
    if len(head) < _SIZE.size or not files:
        raise EOFError
    (size,) = _SIZE.unpack(head)
    return _exactly(connection, size), files[0]


def send_exit_code(connection: socket.socket, code: int) -> None:
    """Send the exit code, if the receiver still exists."""
    try:
        connection.sendall(_CODE.pack(code))
    except OSError:
        return


def receive_exit_code(connection: socket.socket) -> int:
    """Return the exit code. Raises EOFError if the sender is gone."""
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
