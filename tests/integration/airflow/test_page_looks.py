"""Queries of databases for the page: once a second for any number of users, over one connection. A database that hangs
delays no user of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin import health
from airflow_pgchange.errors import PermissionDenied
from airflow_pgchange.plugins import history, page_queries, query_threads
from airflow_pgchange.plugins.databases import Place
from airflow_pgchange.plugins.query_threads import CachedQuery, QueryThread
from tests.ledger import Connect
from tests.waiting import until

Connections = Sequence[psycopg.Connection[Any]]
LOOKERS = "select count(*) = {} from pg_stat_activity where application_name = 'lookers'"


def settled(window: CachedQuery[Any]) -> query_threads.CachedAnswer[Any]:
    """Return the state of a window once its query was answered."""
    window.ask()
    deadline = time.monotonic() + 30
    while window.asking:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return window.latest()


@pytest.fixture
def unrested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call send a query: answers are never reused, and there is no pause between queries."""
    monkeypatch.setattr(query_threads, "FRESH", 0.0)
    monkeypatch.setattr(query_threads, "REST", 0.0)


def sampled_no_more(query_cache: page_queries.QueryCache) -> None:
    deadline = time.monotonic() + 30
    while query_cache._sampler is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def no_thread(_: Any) -> None:
    raise RuntimeError("can't start new thread")


def backend(connections: Connections) -> int:
    return connections[0].info.backend_pid


def test_many_who_look_ask_once(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_threads, "FRESH", 3600.0)
    asked: list[Any] = []
    window = CachedQuery(QueryThread(lambda: [db]), asked.append)
    settled(window)
    lookers = [threading.Thread(target=settled, args=(window,)) for _ in range(20)]
    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join()
    assert len(asked) == 1


def test_all_queries_of_a_database_use_one_connection(db: str, connect: Connect, unrested: None) -> None:
    window = CachedQuery(QueryThread(lambda: [make_conninfo(db, application_name="lookers")]), backend)
    assert settled(window).answer == settled(window).answer
    until(connect(), LOOKERS.format(1))


def test_a_connection_that_was_closed_is_made_anew(db: str, connect: Connect, unrested: None) -> None:

    def question(connections: Connections) -> int:
        connections[0].execute("select")
        return backend(connections)

    window = CachedQuery(QueryThread(lambda: [make_conninfo(db, application_name="lookers")]), question)
    first = settled(window).answer
    connect().execute("select pg_terminate_backend(%s)", [first])
    until(connect(), LOOKERS.format(0))
    again = settled(window)
    assert again.failure is None
    assert again.answer != first


def test_a_connection_that_was_edited_is_looked_at_as_it_is_now(
    db: str, other_db: str, unrested: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_threads, "SETTLED", 0.0)
    known = [db]
    window: CachedQuery[str] = CachedQuery(
        QueryThread(lambda: list(known)), lambda connections: connections[0].info.dbname
    )
    assert str(settled(window).answer) in db
    known[:] = [other_db]
    assert str(settled(window).answer) in other_db


def test_a_connection_that_was_edited_because_its_database_is_gone_is_read_at_once(
    db: str, other_db: str, connect: Connect, unrested: None
) -> None:
    def question(connections: Connections) -> tuple[int, str]:
        connections[0].execute("select")
        return backend(connections), connections[0].info.dbname

    known = [make_conninfo(db, application_name="lookers")]
    window = CachedQuery(QueryThread(lambda: list(known)), question)
    pid, name = settled(window).answer
    known[:] = [other_db]
    connect().execute("select pg_terminate_backend(%s)", [pid])
    until(connect(), LOOKERS.format(0))
    assert name in db
    assert settled(window).answer[1] in other_db


def test_a_question_that_hangs_is_not_waited_for_and_the_last_answer_stays(
    db: str, unrested: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_threads, "PATIENCE", 0.0)
    monkeypatch.setattr(query_threads, "LATE", 0.0)
    begun, go_on = threading.Event(), threading.Event()
    answers = iter(("before", "after"))

    def question(_: Connections) -> str:
        answer = next(answers)
        if answer == "after":
            begun.set()
            go_on.wait(30)
        return answer

    window = CachedQuery(QueryThread(lambda: [db]), question)
    assert settled(window).answer == "before"
    window.ask()
    assert begun.wait(30)
    look = window.latest()
    assert (look.answer, look.late) == ("before", True)
    go_on.set()
    assert settled(window).answer == "after"


def test_an_answer_is_old_only_while_a_question_is_open_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_threads, "PATIENCE", 0.0)
    answer = threading.Event()
    window = CachedQuery(QueryThread(list), lambda _: answer.wait(30))
    window.ask()
    assert not window.latest().late
    monkeypatch.setattr(query_threads, "LATE", 0.0)
    assert window.latest().late
    answer.set()
    while window.asking:
        time.sleep(0.01)
    assert not window.latest().late


def test_an_answer_is_out_before_what_follows_it_is_done(db: str) -> None:
    go_on, noted = threading.Event(), threading.Event()

    def after(said: str, connections: Connections) -> None:
        assert (said, len(connections)) == ("an answer", 1)
        go_on.wait(30)
        noted.set()

    window = CachedQuery(QueryThread(lambda: [db]), lambda _: "an answer", after)
    assert settled(window).answer == "an answer"
    assert not noted.is_set()
    go_on.set()
    assert noted.wait(30)


def test_a_query_that_failed_is_reported_beside_the_other_results(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionDenied("it is not yours")

    monkeypatch.setattr(health, "findings", refused)
    said = page_queries.Status()([connect()])
    assert said.left_out == ["findings and watchers are left out: it is not yours"]


def test_trouble_is_told_without_the_password() -> None:
    window = CachedQuery(
        QueryThread(lambda: ["host=127.0.0.1 port=1 user=somebody password=secretword"]), backend
    )
    look = settled(window)
    assert look.answer is None
    assert "127.0.0.1" in str(look.failure)
    assert "secretword" not in str(look.failure)


def test_a_database_that_a_user_has_viewed_is_sampled_for_a_while(
    db: str, unrested: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[float] = []

    def note(*_: Any) -> None:
        sampled.append(time.monotonic())

    monkeypatch.setattr(history.LastHour, "goes_on", note)
    monkeypatch.setattr(page_queries, "conninfos", lambda place: [db])
    monkeypatch.setattr(page_queries, "SAMPLED_EVERY", 0.05)
    monkeypatch.setattr(page_queries, "LOOKED_LATELY", 3600.0)
    query_cache = page_queries.QueryCache()
    settled(query_cache.status(Place("airline"), {}))
    deadline = time.monotonic() + 30
    while len(sampled) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    monkeypatch.setattr(page_queries, "LOOKED_LATELY", 0.0)
    sampled_no_more(query_cache)


def test_however_much_is_asked_about_few_connections_are_kept(
    db: str, connect: Connect, unrested: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_queries, "OTHERS", 2)
    monkeypatch.setattr(page_queries, "conninfos", lambda _: [make_conninfo(db, application_name="lookers")])
    monkeypatch.setattr(query_threads, "PATIENCE", 30.0)
    query_cache = page_queries.QueryCache()
    for number in range(5):
        assert query_cache.answer(Place("airline"), lambda asked, _: asked, number).answer == number
    assert len(query_cache.others) == 2
    until(connect(), LOOKERS.format(1))


def test_however_many_questions_wait_for_a_database_one_thread_asks_some_of_them_and_the_rest_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_queries, "conninfos", lambda _: [])
    monkeypatch.setattr(query_threads, "PATIENCE", 0.0)
    begun, go_on, asked = threading.Event(), threading.Event(), []

    def question(number: int, _: Connections) -> int:
        begun.set()
        go_on.wait(30)
        asked.append(number)
        return number

    query_cache, before = page_queries.QueryCache(), threading.active_count()
    query_cache.answer(Place("airline"), question, 0)
    assert begun.wait(30)
    answers = [query_cache.answer(Place("airline"), question, number) for number in range(1, 1000)]
    assert threading.active_count() <= before + 1
    refused = [answer for answer in answers if answer.failure is not None]
    assert len(refused) == 999 - query_threads.WAITING
    assert "wait for this database" in str(refused[0].failure)
    assert len(query_cache.others) == query_threads.WAITING + 1
    go_on.set()
    deadline = time.monotonic() + 30
    while len(asked) <= query_threads.WAITING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr(query_threads, "PATIENCE", 30.0)
    assert query_cache.answer(Place("airline"), question, 1000).answer == 1000
    assert asked == [*range(query_threads.WAITING + 1), 1000]


def test_a_question_that_breaks_leaves_its_database_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    line = QueryThread(list)
    settled(CachedQuery(line, lambda _: "an answer", broken))
    assert settled(CachedQuery(line, lambda _: "another")).answer == "another"


def test_a_thread_that_cannot_be_started_leaves_no_question_open(
    db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = CachedQuery(QueryThread(lambda: [db]), backend)
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            window.ask()
    assert settled(window).answer is not None


def test_sampling_outlives_a_question_that_could_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def ask(window: CachedQuery[Any]) -> None:
        if not asked.is_set():
            asked.set()
            no_thread(window)
        again.set()

    again = threading.Event()
    monkeypatch.setattr(CachedQuery, "ask", ask)
    monkeypatch.setattr(page_queries, "SAMPLED_EVERY", 0.05)
    monkeypatch.setattr(page_queries, "LOOKED_LATELY", 3600.0)
    query_cache = page_queries.QueryCache()
    query_cache.status(Place("airline"), {})
    assert again.wait(30)
    monkeypatch.setattr(page_queries, "LOOKED_LATELY", 0.0)
    sampled_no_more(query_cache)


def test_sampling_that_could_not_begin_begins_with_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    again = threading.Event()
    monkeypatch.setattr(CachedQuery, "ask", lambda _: again.set())
    monkeypatch.setattr(page_queries, "SAMPLED_EVERY", 0.05)
    monkeypatch.setattr(page_queries, "LOOKED_LATELY", 3600.0)
    query_cache = page_queries.QueryCache()
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            query_cache.status(Place("airline"), {})
    query_cache.status(Place("airline"), {})
    assert again.wait(30)
    monkeypatch.setattr(page_queries, "LOOKED_LATELY", 0.0)
    sampled_no_more(query_cache)


def test_queries_for_the_page_have_timeouts(db: str) -> None:
    def settings(connections: Connections) -> list[Any]:
        return [
            connections[0].execute(f"show {name}").fetchone()[0]  # type: ignore[index]
            for name in ("statement_timeout", "lock_timeout", "idle_session_timeout")
        ]

    assert settled(CachedQuery(QueryThread(lambda: [db]), settings)).answer == ["10s", "1s", "1min"]
