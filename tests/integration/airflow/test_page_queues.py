"""Queues and sagas on the page: their data, and the users who may see them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.messages import RollBack, Saga, Step, create_saga_queues, handle_saga, start_saga
from tests import page, queues
from tests.airflow_home import uri
from tests.ledger import Connect

pytestmark = pytest.mark.hstore

AIRLINE = "/connections/airline"
TOUR = Saga("tour", (Step("room", "rooms", "no_rooms"), Step("seat", "seats", "no_seats", after=("room",))))
People = Callable[[str | None], page.Person]


@pytest.fixture
def people(airflow: FastAPI, db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> People:
    """A database with a queue of two consumers, and a saga with a refused step."""
    connection = connect()
    queues.make(connection, "orders")
    queues.consumer(connection, "few", "(t.properties->'kind') = 'name of a passenger'", queue="orders")
    first = queues.post(connection, 1, "orders")
    queues.post(connection, 2, "orders", delay="1 hour")
    queues.post(connection, 3, "orders", after=[first])
    connection.execute("select mbus.post_dmq('n=>4', iid => mbus.get_iid('orders'))")
    create_saga_queues(connection, TOUR)
    number = start_saga(connection, TOUR, {"passenger": "name of a passenger"})
    assert number == 1
    for queue, answer in (("rooms", None), ("seats", RollBack("no seat for name of a passenger"))):
        with ConsumerTransaction(QueueFeed(queue), db) as transaction:
            transaction.claim(1)
            (change,) = transaction.changes()
            transaction.ack(
                lambda kept, change=change, answer=answer: handle_saga(kept, change, lambda *_: answer)
            )
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return page.afresh(airflow)


def told(person: page.Person, path: str, what: str) -> dict[str, Any]:
    """Return the answer of a route once its database has answered."""
    deadline = time.monotonic() + 30
    while True:
        answer = person.get(f"{AIRLINE}/{path}")
        found: dict[str, Any] = answer.json()
        if answer.status_code == 200 and (found[what] or found["failure"]):
            return found
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)


def test_a_user_who_may_read_a_dag_sees_how_long_each_queue_is(people: People) -> None:
    names = ("queue", "consumer", "ready", "delayed", "waiting", "in_work", "exact", "dead", "selector")
    for role, selector in (("viewer", None), ("op", "(t.properties->'kind') = 'name of a passenger'")):
        found = told(people(role), "queues", "queues")
        assert found["failure"] is None, role
        first, second = [one for one in found["queues"] if one["queue"] == "orders"]
        assert {one["queue"] for one in found["queues"]} == {"orders", *TOUR.queues}, role
        assert [first[name] for name in names] == ["orders", "default", 1, 1, 1, 0, True, 1, None], role
        assert [second[name] for name in names] == ["orders", "few", 0, 0, 0, 0, True, 1, selector], role
        assert first["oldest_seconds"] > 0, role


def test_why_a_saga_is_undone_and_what_it_has_is_for_who_may_read_the_connection(people: People) -> None:
    for role, may_read in (("viewer", False), ("op", True)):
        person = people(role)
        (saga,) = told(person, "sagas", "sagas")["sagas"]
        progress = (saga["name"], saga["state"], saga["done"], saga["steps"], saga["at"], saga["is_stuck"])
        assert progress == ("tour", "rolling back", 1, 2, ["room", "seat"], False), role
        found = told(person, f"sagas/{saga['id']}", "steps")
        states = [(one["step"], one["after"], one["state"]) for one in found["steps"]]
        assert states == [("room", [], "to compensate"), ("seat", ["room"], "refused")], role
        assert ("passenger" in str(saga)) is may_read, role
        assert [one["error"] is not None for one in found["steps"]] == [False, may_read], role
        assert (found["data"] is not None) is may_read, role
        assert ("name of a passenger" in str(found)) is may_read, role


def test_what_a_saga_has_is_cut_where_it_is_long(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_pgchange.plugins import datamodels

    monkeypatch.setattr(datamodels, "SHOWN", 3)
    op = people("op")
    told(op, "sagas", "sagas")
    assert told(op, "sagas/1", "steps")["data"] == {"content": "{\n ", "cut": True}


def test_a_saga_that_is_stuck_is_so_for_all_and_why_for_who_may_read_the_connection(
    people: People, connect: Connect
) -> None:
    connect().execute("""
        update mbus.saga set
            started_at = now() - interval '3 days', deadline = now() - interval '2 days',
            changed_at = now() - interval '2 days'
    """)
    for role, may_read in (("viewer", False), ("op", True)):
        (saga,) = told(people(role), "sagas", "sagas")["sagas"]
        assert (saga["is_stuck"], saga["stuck"] is not None) == (True, may_read)


def test_a_saga_that_is_made_up_is_not_there_and_nothing_is_kept_for_it(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_pgchange.plugins import page_queries, sagas

    op, query_cache = people("op"), []
    ask = page_queries.QueryCache.answer
    monkeypatch.setattr(
        page_queries.QueryCache, "answer", lambda *question: query_cache.append(question[0]) or ask(*question)
    )
    told(op, "sagas", "sagas")
    deadline = time.monotonic() + 30
    while op.get(f"{AIRLINE}/sagas/7").status_code != 404:
        assert time.monotonic() < deadline
    assert {question for _, question, *_ in query_cache[-1].others} == {sagas.sagas}


def test_a_saga_is_shown_by_a_server_that_has_not_heard_of_the_latest(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_pgchange.plugins import sagas

    nobody = replace(sagas.LATEST, question=lambda _: sagas.LATEST.nothing)
    monkeypatch.setattr(sagas, "LATEST", nobody)
    op = people("op")
    assert op.get(f"{AIRLINE}/sagas/1").status_code == 200
    assert len(told(op, "sagas/1", "steps")["steps"]) == 2


def test_the_data_of_a_saga_are_only_queried_if_they_are_shown(people: People) -> None:
    assert told(people("op"), "sagas/1?data=false", "steps")["data"] is None


def test_queues_and_sagas_of_what_one_may_not_see_are_refused(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    monkeypatch.setattr(get_auth_manager(), "get_authorized_dag_ids", lambda **_: {"kept"})
    viewer = people("viewer")
    for path in ("queues", "sagas", "sagas/1"):
        assert viewer.get(f"{AIRLINE}/{path}").status_code == 403, path
        assert viewer.get(f"/connections/nobodys/{path}").status_code == 403, path


def test_a_database_without_queues_has_none_and_no_sagas(
    airflow: FastAPI, bare_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(bare_db))
    op = page.afresh(airflow)("op")
    assert op.get(f"{AIRLINE}/queues").json() == {"queues": [], "failure": None}
    assert op.get(f"{AIRLINE}/sagas").json() == {"sagas": [], "failure": None}


def test_only_users_who_may_read_the_connection_see_the_content_of_a_letter(
    people: People, connect: Connect
) -> None:
    number = queues.one(connect(), "select id from pgchange.letters()")
    for role, code in (("viewer", 403), ("op", 200)):
        answer = people(role).get(f"{AIRLINE}/letters/{number}")
        assert answer.status_code == code, role
        assert ('"n": "4"' in answer.text.replace("\\", "")) is (code == 200), role
