"""A REST catalog of Iceberg on the loopback interface, over PyIceberg's own SQL catalog on SQLite, with faults.

It speaks the part of the REST protocol that loads tables and commits to them. Tables are created through ``catalog``.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table import CommitTableRequest, Table

from tests import s3


class Fault(Enum):
    """What the catalog does with a commit."""

    DROPPED = "applied, and the connection is closed without an answer"
    FAILED = "applied, and answered with 500"
    CONFLICT = "applied, and answered with 409, as after a proxy has sent the request twice"
    SILENT = "applied, and never answered"
    REFUSED = "not applied, and answered with 503"
    DENIED = "not applied, and answered with 403"


RETRIED = tuple(fault for fault in Fault if fault is not Fault.DENIED)
"""The faults after which the writer searches for the batch in the table, and then commits again."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # The client may have been killed.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class RestCatalog:
    """The catalog.

    The next commits take the ``faults`` in order, and ``fired`` lists the faults that happened. ``commits`` are all
    requests to commit, and ``conflicts`` counts those whose requirements were not met. Each commit is delayed by up to
    ``delay`` seconds. ``answers`` is the HTTP status with which all other requests are refused, if any. ``store`` has
    the files of the tables, if they are on S3.
    """

    def __init__(self, folder: Path, store: s3.Server | None = None) -> None:
        self.store = store
        self.faults: list[Fault] = []
        self.fired: list[Fault] = []
        self.commits: list[CommitTableRequest] = []
        self.conflicts = 0
        self.delay = 0.0
        self.answers: int | None = None
        self.closed = threading.Event()
        self._hold, self._held, self._release = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        # SqlCatalog needs SQLAlchemy 2, so it is imported only here.
        from pyiceberg.catalog.sql import SqlCatalog

        place, settings = (
            (folder.as_uri(), {}) if store is None else (f"s3://{store.bucket()}/rest", store.settings)
        )
        self.catalog = SqlCatalog("rest", uri=f"sqlite:///{folder / 'rest.db'}", warehouse=place, **settings)
        self._server = _Server(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.closed.set()
        self._release.set()
        self._server.shutdown()
        self._server.server_close()
        self.catalog.engine.dispose()

    @contextmanager
    def held(self) -> Iterator[threading.Event]:
        """Hold the next commit before it is applied, until the block ends.

        The yielded event is set when the commit has arrived.
        """
        self._held.clear()
        self._release.clear()
        self._hold.set()
        try:
            yield self._held
        finally:
            self.release()

    def release(self) -> None:
        """Apply the commit that is held."""
        self._release.set()

    def _commit(self, request: CommitTableRequest) -> Table:
        if self._hold.is_set():
            self._hold.clear()
            self._held.set()
            assert self._release.wait(60)
        time.sleep(random.random() * self.delay)
        with self._lock:
            self.commits.append(request)
            table = self.catalog.load_table((*request.identifier.namespace.root, request.identifier.name))
            done = self.catalog.commit_table(table, request.requirements, request.updates)
            return Table(table.name(), done.metadata, done.metadata_location, table.io, self.catalog)

    def _take_fault(self, *, before: bool) -> Fault | None:
        with self._lock:
            if not self.faults or (self.faults[0] in (Fault.REFUSED, Fault.DENIED)) is not before:
                return None
            self.fired.append(self.faults.pop(0))
            return self.fired[-1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if owner.answers is not None:
                    self._refuse(owner.answers, "no")
                    return
                match self._path():
                    case ["config"]:
                        self._say(200, {"defaults": {}, "overrides": {}})
                    case ["namespaces", namespace, "tables", name]:
                        try:
                            self._say_table(owner.catalog.load_table((namespace, name)))
                        except NoSuchTableError as error:
                            self._refuse(404, error)

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                body = self.rfile.read(size)
                if len(body) < size:
                    return
                if self._path() == ["oauth", "tokens"]:
                    self._say(200, {"access_token": "planted-token", "token_type": "bearer"})
                else:
                    self._commit(CommitTableRequest.model_validate_json(body))

            def _commit(self, request: CommitTableRequest) -> None:
                if fault := owner._take_fault(before=True):
                    self._refuse(403 if fault is Fault.DENIED else 503, fault.value)
                    return
                try:
                    table = owner._commit(request)
                except CommitFailedException as error:
                    owner.conflicts += 1
                    self._refuse(409, error)
                    return
                match owner._take_fault(before=False):
                    case Fault.DROPPED:
                        self.close_connection = True
                    case Fault.SILENT:
                        owner.closed.wait(60)
                        self.close_connection = True
                    case Fault.FAILED as fault:
                        self._refuse(500, fault.value)
                    case Fault.CONFLICT as fault:
                        self._refuse(409, fault.value)
                    case _:
                        self._say_table(table)

            def _path(self) -> list[str]:
                return [unquote(part) for part in urlsplit(self.path).path.split("/")[2:]]

            def _say_table(self, table: Table) -> None:
                metadata = json.loads(table.metadata.model_dump_json())
                self._say(
                    200, {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}
                )

            def _refuse(self, code: int, why: object) -> None:
                error = {"message": str(why), "type": type(why).__name__, "code": code}
                self._say(code, {"error": error})

            def _say(self, code: int, answer: Any) -> None:
                body = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


@contextmanager
def running(folder: Path, monkeypatch: Any, store: s3.Server | None = None) -> Iterator[RestCatalog]:
    """Run the catalog, named ``rest`` in PyIceberg's configuration, with one namespace.

    ``store`` has the files of its tables.
    """
    rest = RestCatalog(folder, store)
    try:
        settings = {"uri": rest.uri, **({} if store is None else store.settings)}
        for name, value in s3.environment(settings, "REST").items():
            monkeypatch.setenv(name, value)
        rest.catalog.create_namespace("sales")
        yield rest
    finally:
        rest.close()
