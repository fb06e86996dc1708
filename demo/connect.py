"""A Spark Connect server on the loopback interface. It ends with the process that started it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.postgres import free_port
from demo.spark import clean_environment, java_home, spark_home
from demo.started import Started, die_with_parent

START_PATIENCE = 300.0
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
WARM_UP = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
spark.range(100).selectExpr("id % 2 as k").groupBy("k").count().toArrow()
spark.stop()
"""


@dataclass
class ConnectServer(Started):
    """A server that requires ``token``. Its master is local unless ``master`` names another.

    Its log and data are in ``folder``, which ``stop`` deletes. Use it as a context manager: it answers inside the
    block, and is removed at its end. Its Python processes use this Python and its packages. Raises FileNotFoundError
    without a Java.
    """

    cores: int = 2
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pgchange-connect-")))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)
    port: int = field(default_factory=free_port)
    ui_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self.ui_port}"

    @property
    def connection(self) -> dict[str, Any]:
        """The Airflow connection to the server. Spark's client sends a token without TLS only to this host name."""
        return {
            "conn_type": "spark_connect",
            "host": "sc://localhost",
            "port": self.port,
            "password": self.token,
            "extra": {"ui": self.ui_url},
        }

    @property
    def remote(self) -> str:
        """Spark's connection string."""
        return f"sc://localhost:{self.port}/;token={self.token}"

    def start(self) -> None:
        """Start the server, and wait until it has answered a query, because the first query takes seconds."""
        if java_home() is None:
            raise FileNotFoundError("Spark needs a Java: run scripts/bootstrap")
        conf = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.ui.port": str(self.ui_port),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.log.level": "WARN",
            **self.conf,
        }
        command = [
            str(self._home() / "bin" / "spark-submit"),
            "--class",
            SERVER,
            "--master",
            self.master or f"local[{self.cores}]",
        ]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *(part for name, value in conf.items() for part in ("--conf", f"{name}={value}"))],
                env=self._environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509
            )
        self._wait(self.process)
        self._warm_up()

    def stop(self) -> None:
        """End the server and its Python processes, and delete the folder."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self) -> str:
        return "\n".join((self.folder / "server.log").read_text(errors="replace").splitlines()[-20:])

    def _home(self) -> Path:
        """Return a copy of Spark's folder without its zip of PySpark.

        Each of the server's Python processes would import the zip first and compile it, which takes a second. The first
        batch of a session starts six of them, one after another.
        """
        home = self.folder / "spark"
        home.mkdir(exist_ok=True)
        for name in ("bin", "jars"):
            if not (home / name).exists():
                (home / name).symlink_to(spark_home() / name)
        return home

    def _environment(self) -> dict[str, str]:
        # Remove this checkout from Python's path, so that the server runs the package that was sent to it.
        environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
        return {
            **environment,
            "SPARK_HOME": str(self._home()),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_DIRS": str(self.folder),
            "TMPDIR": str(self.folder),
            # Put Java's temporary files into the folder, because a killed server does not delete them.
            "SPARK_SUBMIT_OPTS": f'-Djava.io.tmpdir="{self.folder}"',
            "SPARK_CONNECT_AUTHENTICATE_TOKEN": self.token,
            **self.environment,
        }

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_PATIENCE
        while not self._listens():
            if process.poll() is not None:
                raise RuntimeError(f"Spark's Connect server ended at start:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Spark's Connect server is not ready in {START_PATIENCE:g} s:\n{self.log_tail()}"
                )
            time.sleep(0.1)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
            return True
        return False

    def _warm_up(self) -> None:
        ran = subprocess.run(
            [sys.executable, "-c", WARM_UP],
            env=clean_environment() | {"SPARK_REMOTE": self.remote},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise RuntimeError(
                f"Spark's Connect server does not work:\n{ran.stderr[-2000:]}\n{self.log_tail()}"
            )
