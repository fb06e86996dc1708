"""A relay in a process of its own, as ``airflow pgchange topology-relay`` is one, without Airflow to start first."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psycopg.conninfo import make_conninfo

from airflow_pgchange.topology import service
from airflow_pgchange.topology.connection import Limits
from demo.postgres import free_port

PATIENCE = 30.0


class RelayProcess:
    """A relay that runs. Its log is read as it is written: ``wait_for`` returns once it says something."""

    def __init__(self, conninfo: str, port: int, options: Mapping[str, Any]) -> None:
        self.port = port
        self.lines: list[str] = []
        self._said = threading.Condition()
        arguments = json.dumps({"conninfo": conninfo, "listen": f"127.0.0.1:{port}", **options})
        root = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.relay_process", arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def conninfo(self, **options: Any) -> str:
        known = {"host": "127.0.0.1", "port": self.port, "dbname": "any", "user": "ann", **options}
        return make_conninfo("", **known)

    def wait_for(self, text: str, times: int = 1) -> str:
        """The line of the log that says ``text`` for the so many-th time. Raises TimeoutError."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        with self._said:
            if not self._said.wait_for(lambda: len(found()) >= times, PATIENCE):
                raise TimeoutError(f"the relay did not say {text!r}; it said: {self.lines}")
            return found()[times - 1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it, and return its exit code."""
        self._process.send_signal(number)
        code = self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def kill(self) -> None:
        if self._process.poll() is None:
            self.stop(signal.SIGKILL)

    def _read(self) -> None:
        if self._process.stderr is not None:
            with self._process.stderr as stderr:
                for line in stderr:
                    with self._said:
                        self.lines.append(line.rstrip())
                        self._said.notify_all()


@contextmanager
def relay_process(conninfo: str, **options: Any) -> Iterator[RelayProcess]:
    """A relay that has reached its catalogue; without ``users`` it trusts everybody. Killed at the end."""
    relay = RelayProcess(conninfo, free_port(), options)
    try:
        relay.wait_for("the catalogue is in term")
        yield relay
    finally:
        relay.kill()


def main(arguments: dict[str, Any]) -> None:
    import logging

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    if "files" in arguments:
        resource.setrlimit(resource.RLIMIT_NOFILE, arguments.pop("files"))
    for name in ("users", "certificate", "key"):
        arguments[name] = arguments.get(name) and Path(arguments[name])
    service.run(
        arguments.pop("conninfo"),
        arguments.pop("listen"),
        limits=Limits(**arguments.pop("limits", {})),
        trust=arguments["users"] is None,
        **arguments,
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
