"""A TCP proxy before a server on this machine. A test can close it, as if the server were gone, or let it fall silent."""

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
        self._speaks = threading.Event()
        self._speaks.set()
        self._serves = threading.Event()
        self._serves.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Refuse new connections, and close the open connections."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._serves.set()
        self._speaks.set()

    def fall_silent(self, *, serve_new: bool = False) -> None:
        """Pass nothing on any more, neither bytes nor the end of a connection. The kernel still acknowledges bytes and
        keepalives, and accepts connections. With ``serve_new`` new connections work."""
        if not serve_new:
            self._serves.clear()
        self._speaks.clear()
        # Let connections made from now on wait for another event, so that only those made before are silent.
        self._speaks = threading.Event()
        if serve_new:
            self._speaks.set()

    def send_new_to(self, server_port: int) -> None:
        """Connect new clients to another server, as a load balancer could."""
        self._server_port = server_port

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                self._serves.wait()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._open.append(server)
                self.connections += 1
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=_pass_on, args=(*pair, self._speaks), daemon=True).start()


def _pass_on(sender: socket.socket, receiver: socket.socket, speaks: threading.Event) -> None:
    with suppress(OSError):
        while True:
            data = sender.recv(65536)
            speaks.wait()
            if not data:
                break
            receiver.sendall(data)
        receiver.shutdown(socket.SHUT_WR)


@contextmanager
def proxy_before(server_port: int) -> Iterator[Proxy]:
    """Run a proxy in front of the server at a port.

    The proxy is closed at the end of the block, if the test has not closed it.
    """
    proxy = Proxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
