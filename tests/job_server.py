"""A stand-in for a remote job API: it runs each job in its own process, and reports the job's state.

It speaks the protocol of the REST API of a standalone Spark master. It has no Spark: a job is a Python program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.quick_spark import ROOT

STATES = {None: "RUNNING", 0: "FINISHED", -9: "KILLED"}


class JobServer:
    """The server, as a context manager.

    ``requests`` lists the requests that started jobs, ``killed`` the ids of killed jobs.

    A job can wait for the end of its input, which ``end_input`` sends. ``state`` replaces the reported state of a job.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: list[str] = []
        self.state: str | None = None
        self.starts_jobs = True
        self.knows_jobs = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connection(self) -> str:
        """The Airflow connection to this server, as if it were a standalone Spark cluster."""
        given = {"conn_type": "spark", "host": "spark://127.0.0.1", "extra": {"rest-port": self.port}}
        return json.dumps(given)

    def __enter__(self) -> JobServer:
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for job in self.jobs.values():
            job.kill()
            job.wait()

    def answer(self, action: str, body: dict[str, Any] | None) -> dict[str, Any]:
        action, _, job = action.partition("/")
        if action == "create":
            return self._created(body or {})
        if action == "kill":
            self.killed.append(job)
            if job in self.jobs:
                self.jobs[job].kill()
            return {"success": True}
        if not self.knows_jobs:
            return {"success": False}
        return {"success": True, "driverState": self.state or STATES.get(self.jobs[job].poll(), "FAILED")}

    def end_input(self) -> None:
        for job in self.jobs.values():
            if job.stdin is not None:
                job.stdin.close()

    def _created(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        name = f"driver-{len(self.requests)}"
        if self.starts_jobs:
            program = next(place for place, part in enumerate(body["appArgs"]) if part.endswith(".py"))
            # Remove Airflow's variables from the environment: a real job runs on another machine.
            kept = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
            self.jobs[name] = subprocess.Popen(
                [sys.executable, *body["appArgs"][program:]],
                env={**kept, "PYTHONPATH": str(ROOT), **body["environmentVariables"]},
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        return {"success": True, "submissionId": name}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict[str, Any] | None) -> None:
                told = json.dumps(server.answer(self.path.removeprefix("/v1/submissions/"), body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            def log_message(self, *_: object) -> None:
                """Discard the log lines of requests."""

        return Handler
