"""A relay in its own process, like ``airflow-pgchange topology-relay``, but without the time to import Airflow.

The relays are forks of one process, which has imported everything: ``python -m tests.relay_process``.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from psycopg.conninfo import make_conninfo

from airflow_pgchange.topology import catalogue, relay, service
from airflow_pgchange.topology.connection import Limits
from demo.postgres import free_port

PATIENCE = 30.0


PID_OR_CODE = struct.Struct("!i")


@functools.cache
def _nursery() -> socket.socket:
    """Start the process that forks relays, and return the socket for requests. The process ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = Path(__file__).parents[1]
    with its:
        subprocess.Popen(
            [sys.executable, "-m", "tests.relay_process"],
            stdin=its.fileno(),
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            start_new_session=True,
        )
    return ours


class RelayProcess:
    """A running relay. Its log is read while the relay writes it. ``wait_for`` returns when the log contains a text."""

    def __init__(self, conninfo: str, port: int, options: Mapping[str, Any]) -> None:
        self.port = port
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._code: int | None = None
        arguments = {"conninfo": conninfo, "listen": f"127.0.0.1:{port}", **options}
        log, its_log = os.pipe()
        self._end, its_end = os.pipe()
        asked = json.dumps({"arguments": arguments, "environment": dict(os.environ)}).encode()
        socket.send_fds(_nursery(), [asked], [its_log, its_end])
        os.close(its_log)
        os.close(its_end)
        self._reader = threading.Thread(target=self._read, args=[log], daemon=True)
        self._reader.start()
        self.pid = self._told()

    def conninfo(self, **options: Any) -> str:
        known = {"host": "127.0.0.1", "port": self.port, "dbname": "any", "user": "ann", **options}
        return make_conninfo("", **known)

    def wait_for(self, text: str, times: int = 1) -> str:
        """Return the line of the log with the n-th occurrence of ``text``.

        Raise TimeoutError if it does not come in time.
        """

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        with self._said:
            if not self._said.wait_for(lambda: len(found()) >= times, PATIENCE):
                raise TimeoutError(f"the log of the relay does not contain {text!r}: {self.lines}")
            return found()[times - 1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the relay, and return its exit code."""
        if self._code is None:
            if not self._has_ended(0):
                os.kill(self.pid, number)
            if not self._has_ended(PATIENCE):
                raise TimeoutError(f"the relay did not end; its log: {self.lines}")
            self._code = self._told()
            os.close(self._end)
            self._reader.join(PATIENCE)
        return self._code

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def _has_ended(self, patience: float) -> bool:
        return bool(select.select([self._end], [], [], patience)[0])

    def _told(self) -> int:
        return int(PID_OR_CODE.unpack(os.read(self._end, PID_OR_CODE.size))[0])

    def _read(self, log: int) -> None:
        with open(log) as file:
            for line in file:
                with self._said:
                    self.lines.append(line.rstrip())
                    self._said.notify_all()


@contextmanager
def relay_process(conninfo: str, **options: Any) -> Iterator[RelayProcess]:
    """Yield a relay that has connected to its catalogue, and kill it at the end of the block.

    Without ``users`` the relay accepts every client. ``most_events`` is the number of events that it reads at once.
    """
    process = RelayProcess(conninfo, free_port(), options)
    try:
        process.wait_for("the catalogue is in term")
        yield process
    finally:
        process.kill()


def run(arguments: dict[str, Any]) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    if "files" in arguments:
        resource.setrlimit(resource.RLIMIT_NOFILE, arguments.pop("files"))
    if "most_events" in arguments:
        catalogue.MOST_EVENTS = relay.MOST_EVENTS = arguments.pop("most_events")
    for name in ("users", "tls_cert", "tls_key"):
        arguments[name] = arguments.get(name) and Path(arguments[name])
    service.run(
        arguments.pop("conninfo"),
        arguments.pop("listen"),
        limits=Limits(**arguments.pop("limits", {})),
        trust=arguments["users"] is None,
        **arguments,
    )


def keep(arguments: dict[str, Any], environment: dict[str, str], log: int, end: int) -> None:
    """Run a relay. Its process id and, later, its exit code are written to ``end``."""
    pid = os.fork()
    if pid:
        os.close(log)
        os.write(end, PID_OR_CODE.pack(pid))
        os.write(end, PID_OR_CODE.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        return
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.close(end)
    os.environ.clear()
    os.environ.update(environment)
    run(arguments)


def main() -> None:
    with socket.socket(fileno=sys.stdin.fileno()) as asked:
        while True:
            request, files, _, _ = socket.recv_fds(asked, 2**20, 2)
            if not request:
                return
            if os.fork() == 0:
                asked.close()
                keep(**json.loads(request), log=files[0], end=files[1])
                return
            for file in files:
                os.close(file)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


if __name__ == "__main__":
    main()
