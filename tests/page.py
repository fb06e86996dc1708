"""Airflow's API with our plugin, in the process of a test, and users of each role."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import Mount

from tests.dag_bags import stored

ROLES = ("viewer", "user", "op", "admin")
DAG = """
from airflow.sdk import DAG
from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators.maintenance import MaintenanceOperator

with DAG("flight_delays", schedule=[feed_asset(CommitFeed("delays", 0), "airline")]):
    MaintenanceOperator(task_id="look_after", postgres_conn_id="airline")

with DAG("copies", schedule=[feed_asset(CommitFeed("copies", 0), "warehouse", "airline")]):
    pass

with DAG("kept"):
    MaintenanceOperator(task_id="look_after", postgres_conn_id="unreachable")
"""


class Person:
    """A user with a browser: the login's cookie, and the headers by which a browser states the origin of a request."""

    def __init__(self, client: TestClient, role: str | None) -> None:
        self._client = client
        self.token = None if role is None else token(role)

    def ask(
        self, method: str, path: str, site: str | None = "same-origin", headers: Any = (), **given: Any
    ) -> httpx.Response:
        headers = {**({} if site is None else {"Sec-Fetch-Site": site}), **dict(headers)}
        if self.token is not None:
            headers["Cookie"] = f"_token={self.token}"
        return self._client.request(method, f"/pgchange{path}", headers=headers, **given)

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.ask("GET", path, **given)

    def post(self, path: str, body: Any = None, **given: Any) -> httpx.Response:
        return self.ask("POST", path, json=body or {}, **given)


def token(role: str) -> str:
    """Return the token of a logged-in user of a role, as in the cookie ``_token``."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    return get_auth_manager().generate_jwt(SimpleAuthManagerUser(username=f"the_{role}", role=role.upper()))


def prepare(folder: Path, url: str = "http://testserver") -> None:
    """Write the configuration that Airflow reads when its API is created."""
    os.environ |= {
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API_AUTH__JWT_SECRET": "0" * 64,
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"the_{role}:{role}" for role in ROLES),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(folder / "passwords.json"),
    }


def password(folder: Path, role: str) -> str:
    """Return the password of the user with a role."""
    found: dict[str, str] = json.loads((folder / "passwords.json").read_text())
    return found[f"the_{role}"]


def parse(folder: Path) -> None:
    """Store three DAGs in Airflow.

    The first is on a feed of ``airline``, the second on a feed with results in ``warehouse``, and the third maintains
    ``unreachable``.
    """
    (folder / "page_dags.py").write_text(DAG)
    parse_folder(folder)


def parse_folder(folder: Path) -> None:
    """Store the DAGs of a folder in Airflow's metadata database."""
    stored(folder)


def served() -> FastAPI:
    """Airflow's API."""
    from airflow.api_fastapi.app import create_app

    return create_app("core")


def mounted(airflow: FastAPI) -> Mount:
    """Return our plugin's application, which is mounted in Airflow's API."""
    (ours,) = [route for route in airflow.routes if isinstance(route, Mount) and route.path == "/pgchange"]
    return ours


def afresh(airflow: FastAPI) -> Callable[[str | None], Person]:
    """A client of Airflow's API whose plugin has not queried any database yet.

    The user has a role, or is not logged in.
    """
    from airflow_pgchange.plugins import page_queries
    from airflow_pgchange.plugins.api import build

    # Stop the plugin's queries when the test is over.
    page_queries.LOOKED_LATELY = 0.0
    mounted(airflow).app = build()
    client = TestClient(airflow)
    return lambda role: Person(client, role)


def overview(person: Person, patience: float = 30) -> dict[str, Any]:
    """Return a view as a user gets it, once each database has answered or failed."""
    deadline = time.monotonic() + patience
    while True:
        answer = person.get("/overview")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        if all(each["state"] in ("answers", "down") for each in found["databases"]):
            return found
        assert time.monotonic() < deadline, found["databases"]


def audit_log() -> list[tuple[str, str, dict[str, Any]]]:
    """Return the event, the user and the details of each entry of ours in the audit log, the oldest first."""
    from airflow.models.log import Log
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        entries = session.scalars(select(Log).where(Log.event.like("pgchange_%")).order_by(Log.id))
        return [(entry.event, entry.owner, json.loads(entry.extra)) for entry in entries]


def noted_of_dags() -> list[tuple[str | None, str | None]]:
    """Return the DAG and the task of each of our audit entries that has any.

    The list is empty, because our actions concern connections.
    """
    from airflow.models.log import Log
    from airflow.utils.session import create_session
    from sqlalchemy import or_, select

    with create_session() as session:
        ours = select(Log.dag_id, Log.task_id).where(Log.event.like("pgchange_%"))
        return [
            (dag, task)
            for dag, task in session.execute(
                ours.where(or_(Log.dag_id.is_not(None), Log.task_id.is_not(None)))
            )
        ]
