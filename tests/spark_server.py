"""A Spark Connect server for all processes of a test run. The first process that needs the server starts it.

``python -m tests.spark_server FOLDER PROCESS`` is a process that keeps the server until the process with the id PROCESS
ends.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from demo.connect import ConnectServer
from tests.quick_spark import DAEMON, QUICK, ROOT
from tests.spark_daemon import PACKAGE
from tests.suite import room

PATIENCE = 600.0
PYTHON = "PGCHANGE_TEST_SERVER_PYTHON"
"""The variable with the path of the Python whose Spark the server uses.

Without it, the server uses the Spark of the tests.
"""
FINISHED = 3
"""The column of the table of sessions in Spark's UI. It is empty while a session is open."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class SharedServer:
    """Access to the server as a user of the test, and the server's data about this user."""

    host: str
    port: int
    token: str
    ui_url: str
    folder: str
    user: str = ""

    @property
    def connection(self) -> dict[str, Any]:
        """The Airflow connection."""
        return {
            "conn_type": "spark_connect",
            "host": self.host,
            "port": self.port,
            "login": self.user,
            "password": self.token,
        }

    @property
    def remote(self) -> str:
        """Spark's connection string."""
        return f"{self.host}:{self.port}/;user_id={self.user};token={self.token}"

    def page(self, path: str) -> str:
        """Return a page of the server's UI or of its REST API."""
        return str(DIRECT.open(self.ui_url + path, timeout=PATIENCE).read().decode())

    def running(self) -> list[dict[str, Any]]:
        """Return the user's jobs that are running."""
        (application,) = json.loads(self.page("/api/v1/applications"))
        jobs = json.loads(self.page(f"/api/v1/applications/{application['id']}/jobs?status=running"))
        return [job for job in jobs if any(f"_User_{self.user}_" in tag for tag in job["jobTags"])]

    def sessions(self) -> tuple[int, int]:
        """Return how many sessions of the user are open, and how many the user has had in all."""
        table, _, _ = self.page("/connect/").partition("Request Statistics")
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("<tr")]
        mine = [cells for cells in rows if cells and self.user in cells[0]]
        return sum(not re.sub(r"<[^>]*>", "", cells[FINISHED]).strip() for cells in mine), len(mine)

    def wait_until_idle(self) -> None:
        """Wait until no job of the user runs and all of the user's sessions are closed."""
        wait_until(
            lambda: not self.running() and self.sessions()[0] == 0 < self.sessions()[1], "an idle server"
        )

    def written(self) -> str:
        """Return the server's log and its event log as text."""
        files = (path for path in Path(self.folder).rglob("*") if path.is_file())
        return "\n".join(
            path.read_text(errors="replace") for path in files if path.suffix not in (".jar", ".zip")
        )


@functools.cache
def connect_server() -> SharedServer:
    """Return the Spark Connect server of this run, and start it if no process has started it yet."""
    folder = room.take() / "connect"
    told = folder / "told.json"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            folder.mkdir(exist_ok=True)
            _start(folder, told)
    return SharedServer(**json.loads(told.read_text()))


def as_user_of_its_own() -> SharedServer:
    """Return the server of this run with a new user."""
    return replace(connect_server(), user=f"user{uuid4().hex}")


def wait_until(found: Any, what: str) -> Any:
    """Call a function until its result is not empty, and return the result."""
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.05)
    return value


def _start(folder: Path, told: Path) -> None:
    owner = room.take().name.removeprefix(room.PREFIX)
    with (folder / "holder.log").open("wb") as log:
        holder = subprocess.Popen(
            [os.environ.get(PYTHON, sys.executable), "-m", "tests.spark_server", str(folder), owner],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + PATIENCE
    while not told.exists():
        if holder.poll() is not None or time.monotonic() > deadline:
            holder.kill()
            raise RuntimeError(f"no Spark Connect server: {(folder / 'holder.log').read_text()[-4000:]}")
        time.sleep(0.05)


def _hold(folder: Path, owner: int) -> None:
    # This variable is set in a worker that has a session of its own. For this server the package must come from the
    # session.
    os.environ.pop(PACKAGE, None)
    ended = os.pidfd_open(owner)
    server_folder = folder / "server"
    events = server_folder / "events"
    events.mkdir(parents=True)
    conf = {
        **QUICK,
        **DAEMON,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(events),
        "spark.eventLog.compress": "false",
    }
    with ConnectServer(conf=conf, environment={"PYTHONPATH": str(ROOT)}, folder=server_folder) as server:
        host, port = server.connection["host"], server.connection["port"]
        told = asdict(SharedServer(host, port, server.token, server.ui_url, str(server_folder)))
        with open(folder / "part", "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(told, file)
        Path(file.name).replace(folder / "told.json")
        select.select([ended], [], [])
    with suppress(OSError):
        room.take().rmdir()


if __name__ == "__main__":
    _hold(Path(sys.argv[1]), int(sys.argv[2]))
