"""A real standalone Spark: a master and workers, each a process of its own, on the loopback interface."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from demo.postgres import free_port
from demo.started import Started

OLDEST_JAVA = 17
START_PATIENCE = 90.0
STOP_PATIENCE = 10.0
DEPLOY = "org.apache.spark.deploy"


def java_home() -> str | None:
    """Return the folder of a Java that Spark supports, from JAVA_HOME, PATH or the system, in this order; None if there
    is none."""
    return next((str(home) for home in _javas() if _java_version(home) >= OLDEST_JAVA), None)


def clean_environment() -> dict[str, str]:
    """Return the environment for Spark's programs: they use this Python and the loopback interface, and no proxy.
    Variables that point to another Spark are left out."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SPARK_", "PYSPARK_", "HADOOP_"))
    }
    java = java_home()
    local = ",".join(
        filter(None, (environment.get("NO_PROXY") or environment.get("no_proxy"), "127.0.0.1", "localhost"))
    )
    return {
        **environment,
        **({} if java is None else {"JAVA_HOME": java}),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", os.defpath))),
        "NO_PROXY": local,
        "no_proxy": local,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@dataclass
class StandaloneSpark(Started):
    """A master with workers of one core each.

    Their logs and work are in ``folder``, which ``stop`` deletes. With ``rest_port`` the master starts drivers on the
    workers. Use it as a context manager: all workers are registered inside the block, and everything is removed at its
    end. Executors use this Python and its packages. Raises FileNotFoundError without a Java.
    """

    workers: int = 2
    memory: str = "1g"
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pgchange-spark-")))
    port: int = field(default_factory=free_port)
    ui_port: int = field(default_factory=free_port)
    rest_port: int | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def master_url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the master and the workers, and return when all are registered."""
        if java_home() is None:
            raise FileNotFoundError(f"Spark needs Java {OLDEST_JAVA} or later: run scripts/bootstrap")
        self._start("master", "master.Master", "--port", str(self.port), "--webui-port", str(self.ui_port))
        self._wait("master", 0)
        for number in range(self.workers):
            self._start_worker(number)
        self._wait("worker-0", self.workers)

    def _start_worker(self, number: int) -> None:
        """Start a worker. ``alive_workers`` shows when it is registered."""
        work = self.folder / f"worker-{number}"
        self._start(
            work.name,
            "worker.Worker",
            *("--cores", "1", "--memory", self.memory, "--webui-port", "0", "--work-dir", str(work)),
            self.master_url,
        )

    def alive_workers(self) -> int:
        """Return the number of workers that the master counts as alive; -1 while it does not answer."""
        try:
            with httpx.Client(trust_env=False, timeout=5) as client:
                state: dict[str, Any] = client.get(f"http://127.0.0.1:{self.ui_port}/json/").json()
        except (httpx.HTTPError, ValueError):
            return -1
        return int(state["aliveworkers"])

    def stop(self) -> None:
        """End the workers, then the master, and delete the folder."""
        for process in reversed(self.processes.values()):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_PATIENCE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self, name: str) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-20:])

    def _wait(self, name: str, workers: int) -> None:
        deadline = time.monotonic() + START_PATIENCE
        while self.alive_workers() < workers:
            for each, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"Spark's {each} ended at start:\n{self.log_tail(each)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"Spark is not ready in {START_PATIENCE:g} s:\n{self.log_tail(name)}")
            time.sleep(0.1)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        # By default the REST server would take port 6066 on every interface.
        rest = (
            {"enabled": "false"}
            if self.rest_port is None
            else {"enabled": "true", "host": "127.0.0.1", "port": str(self.rest_port)}
        )
        environment = clean_environment() | {
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
            "SPARK_MASTER_OPTS": " ".join(
                f"-Dspark.master.rest.{name}={value}" for name, value in rest.items()
            ),
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    spark_home() / "bin" / "spark-class",
                    f"{DEPLOY}.{program}",
                    "--host",
                    "127.0.0.1",
                    *arguments,
                ],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def spark_home() -> Path:
    """Return the folder of pyspark in this Python."""
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        raise FileNotFoundError("pyspark is not installed: run scripts/bootstrap demo")
    return Path(package.origin).parent


def _javas() -> Iterator[Path]:
    java_home, program = os.environ.get("JAVA_HOME"), shutil.which("java")
    if java_home:
        yield Path(java_home)
    if program is not None:
        yield Path(program).resolve().parent.parent
    yield from (path.parent.parent for path in sorted(Path("/usr/lib/jvm").glob("*/bin/java")))


def _java_version(home: Path) -> int:
    try:
        output = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    number = re.search(r'version "(\d+)', output.stderr)
    return int(number[1]) if number else 0
