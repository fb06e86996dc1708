"""Requests that the page's API refuses, limits or logs, for all users and forms of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from airflow_pgchange.plugins import actions, query_threads, request_limit
from tests import page
from tests.airflow_home import uri
from tests.ledger import Connect

AIRLINE = "/connections/airline"
People = Callable[[str | None], page.Person]


@pytest.fixture
def people(airflow: FastAPI, db: str, monkeypatch: pytest.MonkeyPatch) -> People:
    """A database without consumers or letters, and another that is down."""
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    monkeypatch.setenv("AIRFLOW_CONN_UNREACHABLE", "postgres://somebody@127.0.0.1:1/nowhere")
    return page.afresh(airflow)


def noted_since(before: int) -> list[dict[str, Any]]:
    """Return the audit entries about actions that were written after the first ``before`` entries."""
    return [extra for _, _, extra in page.audit_log()[before:]]


DROPPED = {"connection_id": "airline", "ids": [7], "method": "POST"}


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/x+json", "Application/JSON", "application/json; charset=utf-8"],
)
def test_an_action_is_noted_with_its_body_whatever_the_content_type_is(
    people: People, content_type: str
) -> None:
    """Takes seconds if it is the first test that needs Airflow's own database and API: they are created."""
    before = len(page.audit_log())
    answer = people("op").post(
        f"{AIRLINE}/letters/drop", {"ids": [7]}, headers={"Content-Type": content_type}
    )
    assert answer.status_code == 404, answer.text
    assert noted_since(before) == [DROPPED]


def test_the_audit_log_names_what_was_asked_and_nothing_else_that_a_request_has(people: People) -> None:
    before = len(page.audit_log())
    body = {"ids": [7], "connection_id": "unreachable", "source": "unreachable", "dag_id": "kept"}
    answer = people("op").post(f"{AIRLINE}/letters/drop?task_id=look_after&consumer=delays/0", body)
    assert answer.status_code == 404, answer.text
    answer = people("op").post(f"{AIRLINE}/maintenance", body)
    assert answer.status_code == 200, answer.text
    assert noted_since(before) == [DROPPED, {"connection_id": "airline", "method": "POST"}]
    assert page.noted_of_dags() == []


@pytest.mark.parametrize("authorization", ["Basic dGhlX29wOng=", "Bearer", "Negotiate x", "Digest x"])
def test_a_request_from_elsewhere_is_refused_unless_its_header_says_who_asks(
    people: People, authorization: str
) -> None:
    answer = people("op").post(
        f"{AIRLINE}/letters/drop",
        {"ids": [7]},
        site="cross-site",
        headers={"Authorization": authorization},
    )
    assert answer.status_code == 403, answer.text


HUGE = 10**30
TEXTS = ("\ud800", "a\0b", " ", "x" * 20_000)
SKIP = {"consumer": "delays/0", "reason": "no use"}
UNFIT: list[tuple[str, Any]] = [
    *(("consumers/skip", SKIP | {"reason": text}) for text in TEXTS),
    *(
        (f"consumers/{verb}", {**SKIP, "to": "now", "consumer": text})
        for verb in ("skip", "release", "move", "repair", "drop")
        for text in TEXTS
    ),
    *(("consumers/move", {"consumer": "delays/0", "to": text}) for text in TEXTS),
    *(
        ("backfills/start", {"tube": "copies", "table": "ledger"} | {field: text})
        for field in ("tube", "table")
        for text in TEXTS
    ),
    *(
        (f"letters/{verb}", {"ids": [number]})
        for verb in ("redrive", "drop")
        for number in (HUGE, -HUGE, "\ud800")
    ),
    *(
        ("letters/erase", {"key": "4711", field: text})
        for field in ("key", "field", "consumer")
        for text in TEXTS
    ),
    *((f"backfills/{HUGE}/{verb}", {}) for verb in ("pause", "resume", "cancel")),
    ("consumers/skip", {"\ud800": 1}),
    ("consumers/skip", "\ud800"),
    ("consumers/skip", [["\ud800"]]),
]


def test_invalid_text_in_a_request_is_refused_and_not_repeated_in_the_error(people: People) -> None:
    op = people("op")
    for action, body in UNFIT:
        answer = op.ask(
            "POST",
            f"{AIRLINE}/{action}",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 422, (action, body)
        assert len(answer.content) < 1000, (action, body)


def test_a_number_or_name_that_no_database_can_take_is_not_there(people: People) -> None:
    op = people("op")
    # Until the database has answered, the page does not know the consumers.
    page.overview(op)
    for path in (
        f"{AIRLINE}/letters/{HUGE}",
        f"{AIRLINE}/sagas/{HUGE}",
        f"{AIRLINE}/consumer?kind=commit%00&consumer=delays/0%00",
        f"{AIRLINE}%00/letters",
        f"{AIRLINE}/letters?source=%00",
        "/connections/%ED%A0%80/letters",
        "/guides/%00",
        "/page/%00/%00",
    ):
        assert op.get(path).status_code in (403, 404, 422), path


SLOW = {
    "letters": ("pgchange.letter", "GET", "letters/{}"),
    "sagas": ("mbus.saga", "GET", "sagas/{}"),
    "actions": ("pgchange.letter", "POST", "letters/drop"),
}


@pytest.mark.parametrize("kind", ["letters", pytest.param("sagas", marks=pytest.mark.hstore), "actions"])
def test_airflow_answers_while_a_hundred_requests_of_the_page_wait_for_a_lock(
    people: People, airflow: FastAPI, connect: Connect, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow has 40 threads for all requests to its API, also for its own health."""
    monkeypatch.setattr(query_threads, "PATIENCE", 30.0)
    monkeypatch.setattr(request_limit, "PATIENCE", 30.0)
    for limits in (query_threads.LIMITS, actions.LIMITS):
        monkeypatch.setitem(limits, "lock_timeout", "60s")
        monkeypatch.setitem(limits, "statement_timeout", "60s")
    table, method, path = SLOW[kind]
    with connect(autocommit=False) as holder:
        holder.execute(f"lock table {table}")
        healthy = asyncio.run(answers(airflow, method, path, holder))
    assert healthy


async def answers(airflow: FastAPI, method: str, path: str, holder: Any) -> bool:
    """Whether Airflow reports its health while a lock holds up a hundred requests."""
    headers = {"Cookie": f"_token={page.token('op')}", "Sec-Fetch-Site": "same-origin"}
    transport = httpx.ASGITransport(airflow)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://testserver", headers=headers
    ) as client:

        async def ask(number: int) -> None:
            body = {"ids": [number]} if method == "POST" else None
            await client.request(method, f"/pgchange{AIRLINE}/{path.format(number)}", json=body, timeout=60)

        asked = [asyncio.create_task(ask(number)) for number in range(1, 101)]
        waiting = "select count(*) > 0 from pg_locks where not granted"
        async with asyncio.timeout(30):
            while holder.execute(waiting).fetchone() != (True,):
                await asyncio.sleep(0.01)
            health = await client.get("/api/v2/monitor/health")
        is_first = not any(each.done() for each in asked)
        holder.rollback()
        await asyncio.gather(*asked)
        return is_first and health.status_code == 200
