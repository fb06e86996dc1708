"""The operators of the event log, run as a worker runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from airflow.providers.common.compat.sdk import AirflowSkipException
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, task

from airflow_pgchange.errors import ConsumerBusy, HandlerFailed, InvalidArgument, Stopped
from airflow_pgchange.events import Delivery, Event, Handler, publish, subscribe, topical
from airflow_pgchange.operators.events import (
    PublishEventsOperator,
    ReplayEventsOperator,
    SubscribeEventsOperator,
)
from airflow_pgchange.operators.handlers import EventHandlersOperator
from tests.airflow_home import uri

pytestmark = pytest.mark.usefixtures("few_sessions")

Connect = Callable[..., psycopg.Connection[Any]]
SECONDS = 30


@pytest.fixture
def conn_id(db: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return "airline"


@pytest.fixture
def log(connect: Connect) -> psycopg.Connection[Any]:
    return connect()


def run(task: Any) -> Any:
    return task.execute({})


def numbers(connection: psycopg.Connection[Any], group: str = "g") -> list[int]:
    """Return the events that a group has not read."""
    connection.execute("select pgmb.poll_for_events()")
    rows = connection.execute(
        "select (payload ->> 'n')::int from pgmb.read_next_events(%s, peek => true)", [group]
    )
    return [n for (n,) in rows.fetchall()]


def publishing(conn_id: str, *events: Any) -> PublishEventsOperator:
    return PublishEventsOperator(task_id="publish", events=events, postgres_conn_id=conn_id)


def handling(conn_id: str, *handlers: Handler, **more: Any) -> EventHandlersOperator:
    return EventHandlersOperator(
        task_id="handle", group="g", handlers=handlers, postgres_conn_id=conn_id, **more
    )


def test_events_are_published_as_they_were_given(conn_id: str, log: psycopg.Connection[Any]) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    events = [
        Event("a", {"n": 1}, {"by": "me"}),
        {"topic": "b", "payload": None, "at": at.isoformat()},
        {"topic": "c", "subscription_id": "su1"},
    ]
    assert run(publishing(conn_id, *events)) == 3
    rows = log.execute("select topic, payload, metadata, subscription_id from pgmb.events order by topic")
    assert rows.fetchall() == [
        ("a", {"n": 1}, {"by": "me"}, None),
        ("b", None, {}, None),
        ("c", {}, {}, "su1"),
    ]
    assert log.execute("select count(*) from pgmb.scheduled").fetchone() == (1,)


def test_events_in_arguments_can_be_templated_and_serialised(conn_id: str) -> None:
    task = publishing(conn_id, Event("a", at=datetime(2030, 1, 1, tzinfo=UTC)))
    assert task.events == [{"topic": "a", "payload": {}, "metadata": {}, "at": "2030-01-01T00:00:00+00:00"}]
    assert "events" in task.template_fields


def test_events_may_be_what_an_upstream_task_returns_or_a_templates_json(
    conn_id: str, log: psycopg.Connection[Any]
) -> None:
    with DAG("d"):
        upstream = EmptyOperator(task_id="upstream").output
        task = PublishEventsOperator(task_id="returned", events=upstream, postgres_conn_id=conn_id)
        text = PublishEventsOperator(task_id="text", events="{{ events | tojson }}", postgres_conn_id=conn_id)
    assert task.upstream_task_ids == {"upstream"}
    task.events = [{"topic": "a"}]
    text.render_template_fields({"events": [{"topic": "b", "payload": {"n": [1]}}]})
    assert (run(task), run(text)) == (1, 1)
    rows = log.execute("select topic, payload from pgmb.events order by topic").fetchall()
    assert rows == [("a", {}), ("b", {"n": [1]})]


@pytest.mark.parametrize("wrong", ["soon", "{}", {"topic": "a"}, 7, None, ["topic"]], ids=str)
def test_a_value_that_is_no_list_of_events_is_refused(conn_id: str, wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="events must be a list"):
        run(PublishEventsOperator(task_id="publish", events=wrong, postgres_conn_id=conn_id))


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": 1},
        {"topic": ""},
        {"topic": None},
        {"topic": "a", "colour": "red"},
        {"topic": "a", 1: 2},
        {"topic": "a", "at": "soon"},
        {"topic": "a", "at": 1700000000},
    ],
)
def test_an_invalid_event_is_refused_and_nothing_is_published(
    conn_id: str, log: psycopg.Connection[Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument):
        run(publishing(conn_id, Event("a"), wrong))
    assert log.execute("select count(*) from pgmb.events").fetchone() == (0,)


def test_a_group_is_subscribed_once_however_often_the_task_runs(
    conn_id: str, log: psycopg.Connection[Any]
) -> None:
    task = SubscribeEventsOperator(task_id="s", group="g", topics=["a", "b"], postgres_conn_id=conn_id)
    assert run(task) == run(task)
    publish(log, [Event("a", {"n": 1}), Event("c", {"n": 2})])
    assert numbers(log) == [1]


def test_topics_may_be_a_templates_json(conn_id: str, log: psycopg.Connection[Any]) -> None:
    run(SubscribeEventsOperator(task_id="s", group="g", topics='["a", "b"]', postgres_conn_id=conn_id))
    publish(log, [Event("a", {"n": 1}), Event("b", {"n": 2})])
    assert numbers(log) == [1, 2]


@pytest.mark.parametrize("wrong", [{"topics": "['a', 'b']"}, {"topics": "[]"}, {"topics": "[1]"}], ids=str)
def test_an_invalid_selection_is_refused_and_no_subscription_is_created(
    conn_id: str, log: psycopg.Connection[Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument):
        run(SubscribeEventsOperator(task_id="s", group="g", postgres_conn_id=conn_id, **wrong))
    assert log.execute("select count(*) from pgmb.subscriptions").fetchone() == (0,)


def test_handlers_handle_until_nothing_is_left(conn_id: str, log: psycopg.Connection[Any]) -> None:
    subscribe(log, "g")
    publish(log, [Event("t", {"n": n}) for n in range(25)])
    seen: list[int] = []
    handler = Handler("h", lambda delivery: seen.extend(event.payload["n"] for event in delivery.events))
    done = run(handling(conn_id, handler, limit=10))
    assert done == {"batches": 3, "events": 25, "failed": 0, "retried": 0, "given_up": 0}
    assert seen == list(range(25))


def test_nothing_to_do_is_skipped_where_that_is_asked_for(conn_id: str, log: psycopg.Connection[Any]) -> None:
    subscribe(log, "g")
    assert run(handling(conn_id, Handler("h", print)))["batches"] == 0
    with pytest.raises(AirflowSkipException):
        run(handling(conn_id, Handler("h", print), skip_if_empty=True))


def test_a_group_that_another_holds_is_waited_for_skipped_or_fails_the_task(
    conn_id: str, log: psycopg.Connection[Any], connect: Connect
) -> None:
    subscribe(log, "g")
    other = connect()
    other.execute("select pg_advisory_lock(pgmb.lock_key('g'))")
    with pytest.raises(AirflowSkipException):
        run(handling(conn_id, Handler("h", print), on_busy="skip"))
    with pytest.raises(ConsumerBusy):
        run(handling(conn_id, Handler("h", print), on_busy="fail"))
    with pytest.raises(ConsumerBusy):
        run(handling(conn_id, Handler("h", print), busy_timeout=0.1))
    threading.Timer(0.2, other.close).start()
    assert run(handling(conn_id, Handler("h", print)))["batches"] == 0


def test_a_failure_without_retries_fails_the_task(conn_id: str, log: psycopg.Connection[Any]) -> None:
    subscribe(log, "g")
    publish(log, Event("t", {"n": 1}))

    def fail(delivery: Any) -> None:
        raise ValueError("poison")

    with pytest.raises(HandlerFailed):
        run(handling(conn_id, Handler("h", fail, retries=None)))
    assert numbers(log) == [1]


def test_a_killed_task_finishes_the_calls_that_run_and_stores_how_far_it_came(
    conn_id: str, log: psycopg.Connection[Any]
) -> None:
    subscribe(log, "g")
    publish(log, [Event("t", {"n": n}) for n in range(30)])
    tasks: list[EventHandlersOperator] = []
    task = handling(conn_id, Handler("h", lambda delivery: tasks[0].on_kill()), limit=10)
    tasks.append(task)
    with pytest.raises(Stopped):
        run(task)
    assert numbers(log) == list(range(10, 30))


def test_a_task_that_is_killed_before_it_holds_its_group_handles_nothing(
    conn_id: str, log: psycopg.Connection[Any]
) -> None:
    subscribe(log, "g")
    publish(log, Event("t", {"n": 1}))
    task = handling(conn_id, Handler("h", print))
    task.on_kill()
    with pytest.raises(Stopped):
        run(task)
    assert numbers(log) == [1]


def test_a_group_reads_again_from_a_time(conn_id: str, log: psycopg.Connection[Any]) -> None:
    subscribe(log, "g")
    publish(log, [Event("t", {"n": n}) for n in range(5)])
    handler = Handler("h", lambda delivery: None)
    run(handling(conn_id, handler))
    since = log.execute("select now()").fetchone()
    publish(log, [Event("t", {"n": n}) for n in range(5, 8)])
    run(handling(conn_id, handler))
    assert numbers(log) == []
    assert since is not None
    task = ReplayEventsOperator(task_id="r", group="g", since=since[0].isoformat(), postgres_conn_id=conn_id)
    assert run(task) is None
    assert numbers(log) == [5, 6, 7]


def test_a_group_that_has_not_come_so_far_is_not_moved_there(
    conn_id: str, log: psycopg.Connection[Any]
) -> None:
    subscribe(log, "g")
    publish(log, [Event("t", {"n": n}) for n in range(3)])
    log.execute("select pgmb.poll_for_events()")
    since = log.execute("select clock_timestamp()").fetchone()
    publish(log, [Event("t", {"n": n}) for n in range(3, 5)])
    log.execute("select pgmb.poll_for_events()")
    assert since is not None
    run(ReplayEventsOperator(task_id="r", group="g", since=since[0], postgres_conn_id=conn_id))
    assert numbers(log) == list(range(5))
    with pytest.raises(InvalidArgument, match="future"):
        run(
            ReplayEventsOperator(
                task_id="r", group="g", since="2111-01-01T00:00:00Z", postgres_conn_id=conn_id
            )
        )


def test_a_subscription_alone_gets_again_what_was_published_before_it_came(
    conn_id: str, log: psycopg.Connection[Any]
) -> None:
    subscribe(log, "old")
    ids = publish(log, [Event("t", {"n": n}) for n in range(5)] + [Event("u", {"n": 9})], returning=True)
    log.execute("select pgmb.poll_for_events()")
    mine = subscribe(log, "g", topical("t"))
    long_ago = datetime.now(UTC) - timedelta(days=1)
    task = ReplayEventsOperator(
        task_id="r", group="g", subscription_id=mine, since=long_ago, postgres_conn_id=conn_id
    )
    assert run(task) == 5
    assert numbers(log) == list(range(5))
    assert numbers(log, "old") == [0, 1, 2, 3, 4, 9]
    rows = log.execute(
        "select metadata ->> 'replay_of' from pgmb.read_next_events('g', peek => true)"
    ).fetchall()
    assert [row[0] for row in rows] == ids[:5]


def test_a_time_without_a_zone_is_refused(conn_id: str, log: psycopg.Connection[Any]) -> None:
    subscribe(log, "g")
    for since in ("2026-01-01T00:00:00", "yesterday", None, 5):
        with pytest.raises(InvalidArgument, match="since"):
            run(ReplayEventsOperator(task_id="r", group="g", since=since, postgres_conn_id=conn_id))


@pytest.mark.parametrize("reliable", [True, False])
def test_a_function_that_is_decorated_handles_events_with_arguments_of_its_own(
    conn_id: str, log: psycopg.Connection[Any], reliable: bool
) -> None:
    seen: list[tuple[str, str, int]] = []

    async def greet(delivery: Delivery, word: str) -> None:
        seen.extend((delivery.handler, word, event.payload["n"]) for event in delivery.events)

    run(SubscribeEventsOperator(task_id="subscribe", group="g", topics=["a"], postgres_conn_id=conn_id))
    run(publishing(conn_id, Event("a", {"n": 1})))
    with DAG("events"):
        made = task.pgchange_handler(group="g", postgres_conn_id=conn_id, handler={"reliable": reliable})
        decorated = made(greet)(word="hello").operator
    assert decorated.handlers[0].reliable is reliable
    assert run(decorated)["events"] == 1
    assert seen == [("greet", "hello", 1)]
