"""What the page's API refuses, bounds and notes, whoever asks and however a request is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from tests import page
from tests.airflow_home import uri

AIRLINE = "/connections/airline"
People = Callable[[str | None], page.Person]


@pytest.fixture
def people(airflow: FastAPI, db: str, monkeypatch: pytest.MonkeyPatch) -> People:
    """A database without consumers or letters, and another that is down."""
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    monkeypatch.setenv("AIRFLOW_CONN_UNREACHABLE", "postgres://somebody@127.0.0.1:1/nowhere")
    return page.afresh(airflow)


def noted_since(before: int) -> list[dict[str, Any]]:
    """What the audit log says of the actions since it had so many entries."""
    return [extra for _, _, extra in page.audit_log()[before:]]


DROPPED = {"connection_id": "airline", "ids": [7], "method": "POST"}


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/x+json", "Application/JSON", "application/json; charset=utf-8"],
)
def test_an_action_is_noted_with_its_body_whatever_the_content_type_is(
    people: People, content_type: str
) -> None:
    """Seconds: the first test that needs them has Airflow's own database and API made."""
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
