"""A real Airflow with its own home: API server, scheduler, DAG processor and triggerer on the loopback interface."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from demo.postgres import free_port
from demo.spark import clean_environment
from demo.started import Started

COMPONENTS: dict[str, list[str]] = {
    "api-server": ["api-server", "--host", "127.0.0.1"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}
WATCHED = {"scheduler": "scheduler", "triggerer": "triggerer", "dag_processor": "dag-processor"}
START_PATIENCE = 120.0
ANSWER_PATIENCE = 120.0
STOP_PATIENCE = 10.0
"""Seconds until a component is killed. The scheduler would wait for its running tasks as long as they take."""


@dataclass
class LocalAirflow(Started):
    """Airflow over the PostgreSQL database at ``metadata_url``; ``connections`` are created in it, by id. ``settings``
    are settings of Airflow, named ``SECTION__NAME``. Use it as a context manager: it is healthy inside the block, and
    removed at its end."""

    home: Path
    metadata_url: str
    dags: Path
    connections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    user: str = "admin"
    password: str = field(default_factory=lambda: secrets.token_urlsafe(9), repr=False)
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Put temporary files into the home, which is deleted at the end, because killed tasks leave files behind.
        self.temporary = self.home / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._environment = self._settings()
        self._token: str | None = None
        # Bypass a proxy of the environment for the loopback address.
        self._client = httpx.Client(base_url=self.url, timeout=ANSWER_PATIENCE, trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Migrate the metadata database, start the four components, and return when all are healthy."""
        self._migrate()
        for name in COMPONENTS:
            self.start_component(name)
        deadline = time.monotonic() + START_PATIENCE
        while not self._healthy():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"Airflow's {name} ended at start:\n{self.log_tail(name)}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"{name}:\n{self.log_tail(name)}" for name in self.processes)
                raise TimeoutError(f"Airflow is not healthy after {START_PATIENCE:g} s\n{logs}")
            time.sleep(0.3)
        for name, connection in self.connections.items():
            self._connect(name, connection)

    def _connect(self, name: str, connection: Mapping[str, Any]) -> None:
        """Create a connection in Airflow's database, where its pages show it."""
        fields = {key: value for key, value in connection.items() if key != "extra"}
        # An empty extra would be taken for a secret that is too short to be masked.
        extra = {"extra": json.dumps(connection["extra"])} if connection.get("extra") else {}
        self._request("POST", "connections", json={**fields, "connection_id": name, **extra}, expect=(201,))

    def _migrate(self) -> None:
        done = subprocess.run(
            [*_airflow(), "db", "migrate"],
            env=self._environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"Airflow cannot make its metadata database:\n{done.stdout[-2000:]}")

    def command_line(self) -> Path:
        """Write a program into the home that calls ``airflow`` with these settings, for people."""
        program = self.home / "airflow"
        lines = [
            f"export {name}={shlex.quote(value)}"
            for name, value in self._environment.items()
            if os.environ.get(name) != value
        ]
        with open(program, "w", opener=lambda path, flags: os.open(path, flags, 0o700)) as file:
            print("#!/bin/sh", *lines, f'exec {shlex.join(_airflow())} "$@"', sep="\n", file=file)
        return program

    def start_component(self, name: str, called: str | None = None) -> None:
        """Start a component. If it runs already, ``called`` is the name of the other."""
        called = called or name
        arguments = [*COMPONENTS[name], *(["--port", str(self.port)] if name == "api-server" else [])]
        with (self.home / f"{called}.log").open("ab") as log:
            self.processes[called] = subprocess.Popen(
                [*_airflow(), *arguments],
                env=self._environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill_component(self, name: str) -> None:
        """Kill a component and its child processes with SIGKILL."""
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End the components as Airflow expects it, and then the processes that they left behind."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_PATIENCE
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log_tail(self, name: str) -> str:
        return "\n".join((self.home / f"{name}.log").read_text(errors="replace").splitlines()[-20:])

    def unpause(self, dag_id: str, patience: float = 60) -> None:
        """Wait until the DAG processor has found a DAG, unpause it, and let it be parsed again at once.

        Its assets are watched only after that. By itself the DAG processor would parse the file again after half a
        minute.
        """
        deadline = time.monotonic() + patience
        while True:
            answer = self._request("PATCH", f"dags/{dag_id}", json={"is_paused": False}, expect=(200, 404))
            if answer.status_code == httpx.codes.OK:
                # A conflict means that another DAG of the same file has already requested it.
                self._request("PUT", f"parseDagFile/{answer.json()['file_token']}", expect=(200, 201, 409))
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Airflow has not found the DAG {dag_id} in {self.dags}:\n{self.log_tail('dag-processor')}"
                )
            time.sleep(0.5)

    def pause(self, dag_id: str) -> None:
        self._request("PATCH", f"dags/{dag_id}", json={"is_paused": True})

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        answer = self._request(
            "POST", f"dags/{dag_id}/dagRuns", json={"conf": conf or {}, "logical_date": None}, expect=(200,)
        )
        return str(answer.json()["dag_run_id"])

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """Return the DAG's runs, the newest first."""
        response = self._request(
            "GET", f"dags/{dag_id}/dagRuns", params={"order_by": "-run_after", "limit": 100}
        )
        return list(response.json()["dag_runs"])

    def asset_events(self) -> list[dict[str, Any]]:
        return list(self._request("GET", "assets/events", params={"limit": 100}).json()["asset_events"])

    def update_asset(self, name: str) -> None:
        """Create an event of an asset, which starts the DAGs that are scheduled on it."""
        assets = self._request("GET", "assets", params={"name_pattern": name}).json()["assets"]
        (asset,) = (one["id"] for one in assets if one["name"] == name)
        self._request("POST", "assets/events", json={"asset_id": asset})

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        response = self._request("GET", f"dags/{dag_id}/dagRuns/{run_id}/taskInstances")
        return list(response.json()["task_instances"])

    def task_logs(self, dag_id: str) -> str:
        """Return the logs of all tasks of a DAG."""
        files = sorted((self.home / "logs").glob(f"dag_id={dag_id}/**/*.log"))
        return "\n".join(path.read_text(errors="replace") for path in files)

    def _healthy(self) -> bool:
        try:
            health = self._client.get("/api/v2/monitor/health", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return False
        return all((health.get(name) or {}).get("status") == "healthy" for name in WATCHED)

    def _request(
        self, method: str, path: str, *, expect: tuple[int, ...] = (200,), **details: Any
    ) -> httpx.Response:
        if self._token is None:
            login = self._client.post("/auth/token", json={"username": self.user, "password": self.password})
            login.raise_for_status()
            self._token = str(login.json()["access_token"])
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            answer = self._client.request(method, f"/api/v2/{path}", headers=headers, **details)
        except httpx.TimeoutException as error:
            raise TimeoutError(
                f"Airflow did not answer {method} {path} within {ANSWER_PATIENCE:g} s: this machine may be too busy"
            ) from error
        if answer.status_code not in expect:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer

    def _settings(self) -> dict[str, str]:
        passwords = self.home / "passwords.json"
        with open(passwords, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump({self.user: self.password}, file)
        settings = {
            "API__BASE_URL": self.url,
            "API__PORT": str(self.port),
            "API__SECRET_KEY": secrets.token_hex(16),
            "API__WORKERS": "1",
            "API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "CORE__DAGS_FOLDER": str(self.dags),
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__PARALLELISM": "2",
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
            "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{self.user}:admin",
            "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "DATABASE__SQL_ALCHEMY_CONN": self.metadata_url,
            "LOGGING__BASE_LOG_FOLDER": str(self.home / "logs"),
            "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
            "USAGE_DATA_COLLECTION__ENABLED": "False",
            **self.settings,
        }
        environment = {
            key: value for key, value in clean_environment().items() if not key.startswith("AIRFLOW")
        }
        return {
            **environment,
            "AIRFLOW_HOME": str(self.home),
            "PYTHONPATH": str(Path(__file__).parent.parent),
            "SPARK_LOCAL_DIRS": str(self.home / "spark"),
            "TMPDIR": str(self.temporary),
            **{f"AIRFLOW__{key}": value for key, value in settings.items()},
        }


def airflow_connection(conninfo: str) -> dict[str, Any]:
    """Return an Airflow connection of type postgres."""
    parameters = conninfo_to_dict(make_conninfo(conninfo))
    names = {"host": "host", "port": "port", "user": "login", "password": "password", "dbname": "schema"}
    extra = {key: value for key, value in parameters.items() if key not in names}
    fields = {theirs: parameters[ours] for ours, theirs in names.items() if parameters.get(ours) is not None}
    if "port" in fields:
        fields["port"] = int(str(fields["port"]))
    return {"conn_type": "postgres", **fields, "extra": extra}


def sqlalchemy_url(conninfo: str) -> str:
    """Return the URL of the metadata database in the form that Airflow needs."""
    parameters = conninfo_to_dict(conninfo)
    return f"postgresql+psycopg2://{quote(str(parameters['user']))}@{parameters['host']}:{parameters['port']}/{parameters['dbname']}"


def _airflow() -> list[str]:
    return [sys.executable, "-m", "airflow"]
