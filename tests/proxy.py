"""A TCP proxy before a server on this machine. To its clients the server is gone once a test closes the proxy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Proxy:
    """Passes on all bytes of all connections, in both directions, until it is closed."""

    def __init__(self, server_port: int) -> None:
        self.connections = 0
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Refuse new connections and end those that are open."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._open += [client, server]
                self.connections += 1
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(sender: socket.socket, receiver: socket.socket) -> None:
    with suppress(OSError):
        while data := sender.recv(65536):
            receiver.sendall(data)
        receiver.shutdown(socket.SHUT_WR)


@contextmanager
def proxy_before(server_port: int) -> Iterator[Proxy]:
    """A proxy before the server at a port, closed at the end at the latest."""
    proxy = Proxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
