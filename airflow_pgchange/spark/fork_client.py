"""Run an application beside a Spark Connect server, in a fork of a process that has imported everything already."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from airflow_pgchange.errors import ApplicationFailed
from airflow_pgchange.spark import fork_protocol, package
from airflow_pgchange.spark.application import Application

__all__ = ["Application", "Running", "start"]

PATIENCE = 300.0
"""Seconds for a fork server to import all that it needs."""
SERVER = "airflow_pgchange.spark.fork_server"
LONGEST = 60
"""The longest path of a temporary folder, in characters. The path of a socket in it may have only about 100."""
SHOWN = 500
"""The number of characters of an application's last line that an error shows."""


class Running:
    """An application that runs. It ends by itself, when it is stopped, or with this process."""

    def __init__(self, connection: socket.socket, log: int) -> None:
        self._connection = connection
        self._log = log
        self._rest = b""
        self._last = ""

    def wait(self, say: Callable[[str], None]) -> None:
        """Pass each line of the application's output to ``say`` until it ends. Raises ApplicationFailed if it fails."""
        sources: list[socket.socket | int] = [self._connection, self._log]
        try:
            while self._connection not in (ready := select.select(sources, [], [])[0]):
                if ready and not self._read(say):
                    sources.remove(self._log)
            code = self._code()
            os.set_blocking(self._log, False)
            with suppress(BlockingIOError):
                while self._read(say):
                    pass
            self._say(say, self._rest)
        finally:
            self._connection.close()
            os.close(self._log)
        if code != 0:
            raise ApplicationFailed(
                f"the application ended with code {code}: {self._last[:SHOWN] or 'it said nothing'}"
            )

    def stop(self) -> None:
        """End the application, its child processes, and its operations on the server. Can be called from another thread
        or a signal handler."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _code(self) -> int:
        try:
            return fork_protocol.receive_exit_code(self._connection)
        except (EOFError, OSError) as error:
            raise ApplicationFailed(
                "the application was killed, because the process that supervises it has ended unexpectedly"
            ) from error

    def _read(self, say: Callable[[str], None]) -> bool:
        read = os.read(self._log, 1 << 16)
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            self._say(say, line)
        return bool(read)

    def _say(self, say: Callable[[str], None], line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            # Skip indented lines, which are frames of a stack trace.
            self._last = self._last if text[0].isspace() else text
            say(text)


def start(application: Application, keeper: int) -> Running:
    """Start an application in a fork of the fork server, which ends with the process ``keeper``. Start the fork server
    first if there is none."""
    reading, writing = os.pipe()
    try:
        connection = _connection(keeper)
        fork_protocol.send(connection, application.to_bytes(), writing)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return Running(connection, reading)


def _connection(keeper: int) -> socket.socket:
    folder = _folder()
    version = hashlib.sha256(f"{package.archive()}\0{sys.executable}".encode()).hexdigest()[:12]
    path = folder / f"{keeper}-{version}"
    with (folder / fork_protocol.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _connect(path) or _connect_to_new(path, keeper)


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def _connect_to_new(path: Path, keeper: int) -> socket.socket:
    path.unlink(missing_ok=True)
    log = path.with_suffix(".log")
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", SERVER, str(path), str(keeper)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + PATIENCE
    while (connection := _connect(path)) is None:
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            last_line = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ApplicationFailed(
                f"the process that starts applications for Spark Connect ended before it was ready: {last_line}"
            )
        time.sleep(0.02)
    log.unlink(missing_ok=True)
    return connection


def _folder() -> Path:
    """Return the folder of the sockets, which only this user can use."""
    parent = tempfile.gettempdir()
    folder = Path(parent if len(parent) <= LONGEST else "/tmp", f"pgchange-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionError(f"{folder} is not a folder that only this user can use: remove it")
    return folder
