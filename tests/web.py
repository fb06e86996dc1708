"""A real web server in a thread, and a client of server-sent events, for the tests."""

from __future__ import annotations

import gzip
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import uvicorn

from demo.postgres import free_port

SECONDS = 30
"""The time for which a test waits for an expected event."""


@contextmanager
def served(app: Any, before_end: Callable[[], None] = lambda: None, port: int | None = None) -> Iterator[str]:
    """Serve an application while the block runs, and yield its address. Raise an error if it does not start."""
    port = port or free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1))
    started, startup = threading.Event(), server.startup

    async def note_startup(*args: Any, **kwargs: Any) -> None:
        try:
            await startup(*args, **kwargs)
        finally:
            started.set()

    server.startup = note_startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert started.wait(SECONDS)
        assert server.started, "the application did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        before_end()
        server.should_exit = True
        thread.join(SECONDS)
    assert not thread.is_alive()


@dataclass(frozen=True)
class Request:
    """A request that a receiver of webhooks got. ``body`` is uncompressed."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.body)["events"]
        return found


Answer = Callable[[Request], int]


@contextmanager
def receiving(
    answer: Answer = lambda request: 200, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[int, list[Request]]]:
    """Run a receiver of webhooks on the loopback interface. Yield its port, and the list of requests that it receives."""
    requests: list[Request] = []

    class Handle(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(sent["content-length"]))
            body = gzip.decompress(body) if sent.get("content-encoding") == "gzip" else body
            requests.append(Request(self.path, sent, body))
            status = answer(requests[-1])
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with serving(Handle, tls) as port:
        yield port, requests


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run a server on the loopback interface while the block runs, and yield its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(SECONDS)


@dataclass(frozen=True)
class Message:
    """A message of a stream: the text between two empty lines. ``comment`` is text that is not part of an event."""

    type: str = "message"
    id: str = ""
    data: str = ""
    comment: str = ""


class Listener:
    """An open stream, read one message at a time as a browser's EventSource does."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.last_id = ""
        self._lines = response.iter_lines()

    def messages(self) -> Iterator[Message]:
        """Yield all messages until the stream ends, also comments and messages that have only an id."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if not line:
                yield self._message(fields)
                fields = {}
            else:
                name, _, value = line.partition(":")
                fields[name] = value.removeprefix(" ")

    def events(self, count: int | None = None) -> list[Message]:
        """Return the next ``count`` events, or all events until the stream ends."""
        found: list[Message] = []
        while count is None or len(found) < count:
            message = next(self.messages(), None)
            if message is None:
                break
            if message.data:
                found.append(message)
        return found

    def _message(self, fields: dict[str, str]) -> Message:
        self.last_id = fields.get("id", self.last_id)
        return Message(
            fields.get("event", "message"), fields.get("id", ""), fields.get("data", ""), fields.get("", "")
        )


@contextmanager
def listening(url: str, last_id: str = "", **headers: str) -> Iterator[Listener]:
    """Open a stream. When the block begins, the stream has sent its first id."""
    sent = {**headers, **({"Last-Event-ID": last_id} if last_id else {})}
    with httpx.stream("GET", url, headers=sent, timeout=SECONDS) as response:
        response.raise_for_status()
        listener = Listener(response)
        if not last_id:
            next(listener.messages())
        yield listener
