"""The operators of queues and sagas, run as a worker runs them."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, TaskDeferred
from airflow.sdk import DAG, task
from structlog.testing import capture_logs

from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.assets.sagas import saga_schedule
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.messages import RollBack, TryAgain, queues
from airflow_pgchange.messages.queues import Message
from airflow_pgchange.operators.maintenance import MaintenanceOperator
from airflow_pgchange.operators.messages import PostMessageOperator, RequestMessageOperator
from airflow_pgchange.operators.sagas import SagaHandlerOperator, StartSagaOperator
from airflow_pgchange.sensors.sagas import SagaSensor
from airflow_pgchange.triggers.feed import ReplyTrigger
from tests.airflow_home import uri
from tests.queues import consume, fill, make, post, there
from tests.sagas import TOUR, WORKED, note, prepare
from tests.waiting import until

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]

SOON = timedelta(seconds=30)


@pytest.fixture
def conn_id(db, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(db))
    return "shop"


@pytest.fixture
def connection(connect):
    connection = connect()
    make(connection, "q", "answers")
    return connection


def run(task: Any) -> Any:
    return task.execute({})


def posting(**given):
    return PostMessageOperator(task_id="post", postgres_conn_id="shop", **{"queue_name": "q", **given})


def asking(**given):
    given = {"queue_name": "q", "data": {"n": "1"}, "timeout": SOON, "poll_interval": 0.01, **given}
    return RequestMessageOperator(task_id="ask", postgres_conn_id="shop", **given)


def serve(connection):
    """Answer the next request with twice its n, as a service would."""
    for iid, properties, n in connection.execute(
        "select iid, hstore_to_json(properties), (data -> 'n')::int from mbus.consume('q')"
    ).fetchall():
        return queues.answer(connection, iid, properties, {"twice": str(2 * n)})
    return None


def test_a_message_is_posted_as_it_was_given(conn_id, connection):
    odd = {'a "quoted" \\ => name': None, "ü": "line\nend, 'x'"}
    iid = run(posting(data=odd, properties={"kind": "x"}))
    row = connection.execute(
        "select iid, hstore_to_json(data), properties -> 'kind' from mbus.consume('q')"
    ).fetchone()
    assert row == (iid, odd, "x")


def test_a_message_may_wait_for_its_time_and_for_others(conn_id, connection):
    first = run(posting(data={"n": "1"}))
    run(posting(data={"n": "2"}, after=[first]))
    run(posting(data={"n": "3"}, delay=timedelta(hours=1)))
    run(posting(data={"n": "4"}, expiry=timedelta(0)))
    with ConsumerTransaction(QueueFeed("q"), connection.info.dsn) as transaction:
        assert transaction.claim(10).count == 1
        transaction.ack()
    assert [consume(connection), consume(connection)] == ["2", None]


@pytest.mark.parametrize("data", ["a text", {"n": 1}, {1: "n"}])
def test_an_invalid_message_is_refused(conn_id, connection, data):
    with pytest.raises(InvalidArgument, match="text"):
        run(posting(data=data))
    assert there(connection) == []


def test_a_text_is_not_taken_for_the_iids_of_its_letters(connection):
    with pytest.raises(InvalidArgument, match="sequence of iids"):
        queues.post(connection, "q", queues.Message({"n": "2"}, after="q.1"))
    assert there(connection) == []


@pytest.mark.parametrize("reply_queue", [None, "answers"])
def test_a_request_returns_its_answer(conn_id, connection, connect, reply_queue):
    server = connect()
    found: list[Any] = []
    asker = threading.Thread(target=lambda: found.append(run(asking(reply_queue=reply_queue))))
    asker.start()
    while serve(server) is None:
        assert asker.is_alive()
    asker.join()
    assert found == [{"twice": "2"}]
    assert there(connection, "answers") == []


def test_a_request_that_nobody_answers_fails(conn_id, connection):
    with pytest.raises(AirflowException, match="no answer came"):
        run(asking(timeout=timedelta(0)))


def test_a_deferred_request_goes_on_with_its_own_answer(conn_id, connection):
    task = asking(reply_queue="answers", deferrable=True)
    deferred = []
    for _ in range(2):
        with pytest.raises(TaskDeferred) as caught:
            run(task)
        deferred.append(caught.value.trigger)
    serve(connection)
    serve(connection)
    first, second = deferred
    assert first.iid != second.iid
    path, arguments = second.serialize()
    assert path.endswith("ReplyTrigger")

    async def fire():
        async with asyncio.timeout(30):
            return [event.payload async for event in ReplyTrigger(**arguments).run()]

    [event] = asyncio.run(fire())
    assert task.resume({}, event) == {"twice": "2"}
    assert connection.execute('select iid from mbus."qt$answers"').fetchall() == [(first.iid,)]


def test_an_answer_that_somebody_else_received_is_missed_by_name(conn_id, connection):
    with pytest.raises(AirflowException, match=r"answers\.7 is gone: nobody may consume from queue answers"):
        asking(reply_queue="answers").resume({}, {"iid": "answers.7"})


def test_a_temporary_queue_cannot_be_waited_for_in_the_triggerer():
    with pytest.raises(InvalidArgument, match="name a reply_queue"):
        asking(deferrable=True)


def test_a_global_wish_to_defer_is_for_requests_that_can(monkeypatch):
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", "True")
    assert asking().deferrable is False
    assert asking(reply_queue="answers").deferrable is True
    assert asking(reply_queue="answers", deferrable=False).deferrable is False


def request(connection):
    """Post a request, and return the message that a handler gets."""
    query = "select iid, hstore_to_json(properties) from mbus.consume('q')"
    return connection.execute(query).fetchone()


def test_a_handler_whose_requesting_session_has_ended_goes_on(connection, connect_to, db):
    session = connect_to(db)
    gone = queues.temporary_queue(session)
    queues.request(connection, "q", Message({"n": "1"}), gone)
    session.close()
    until(connection, f"select not mbus.lives('{gone}')")
    with connection.transaction():
        assert queues.answer(connection, *request(connection), {"n": "2"}) is None
        post(connection, "kept", "answers")
    assert there(connection, "answers") == ["kept"]


def test_a_request_that_is_handled_again_is_answered_once(connection):
    iid = queues.new_iid(connection, "answers")
    queues.request(connection, "q", Message({"n": "1"}), "answers", iid)
    asked = request(connection)
    assert queues.answer(connection, *asked, {"n": "first"}) == iid
    assert queues.answer(connection, *asked, {"n": "second"}) is None
    assert queues.take(connection, iid) == {"n": "first"}


def test_an_answer_that_nobody_takes_is_deleted_after_its_lifetime(connection):
    for expiry in (timedelta(0), timedelta(days=1)):
        iid = queues.new_iid(connection, "answers")
        queues.request(connection, "q", Message({"n": "1"}), "answers", iid)
        queues.answer(connection, *request(connection), {"n": str(expiry.days)}, expiry=expiry)
    queues.look_after(connection)
    assert there(connection, "answers") == ["1"]


def test_a_message_comes_again_after_a_delay_with_a_count(connection, db):
    iid = post(connection, 1)
    counts: list[int] = []
    for _ in range(2):
        with ConsumerTransaction(QueueFeed("q"), db) as transaction:
            transaction.claim(10)
            again = select("mbus.try_again", iid, timedelta(), "engaged")
            transaction.ack(lambda kept, again=again: counts.append(ask(kept, again)))
    assert counts == [2, 3]
    row = connection.execute(
        "select iid, properties -> 'tries', properties -> 'error' from mbus.consume('q')"
    ).fetchone()
    assert row == (iid, "3", "engaged")
    queues.post(connection, "q", Message({"n": "2"}))
    with connection.transaction():
        (received,) = connection.execute("select iid from mbus.consume('q')").fetchone()
        ask(connection, select("mbus.try_again", received, timedelta(hours=1)))
    assert consume(connection) is None


def test_maintenance_deletes_what_expired_and_tells_what_a_person_should_look_at(db, conn_id, connection):
    post(connection, 1, expires="-1 hour")
    fill(connection, [2])
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), ConsumerTransaction(QueueFeed("q"), db) as transaction:
            transaction.claim(10)
            raise ZeroDivisionError
    prepare(connection)
    number = run(StartSagaOperator(task_id="start", saga=TOUR, data={}, postgres_conn_id="shop"))
    connection.execute("select mbus.consume('rooms')")
    report = maintain(connection)
    assert report.failed == []
    assert any("queue q: deleted" in line for line in report.done)
    assert any("queue:q/default" in line and "has failed 3 times" in line for line in report.attention)
    assert any(f"saga tour {number} is stuck" in line for line in report.attention)


def test_a_saga_is_not_handled_from_another_database():
    with pytest.raises(InvalidArgument, match="leave source_conn_id out"):
        SagaHandlerOperator(task_id="rooms", queue_name="rooms", source_conn_id="elsewhere")


def test_the_maintenance_task_forgets_sagas_that_ended_long_ago(conn_id, connection):
    prepare(connection)
    for ended in ("31 days", "29 days"):
        run(StartSagaOperator(task_id="start", saga=TOUR, data={}, postgres_conn_id="shop"))
        connection.execute(
            "update mbus.saga set state = 'complete', changed_at = now() - %s::interval where state = 'forward'",
            [ended],
        )
    keep = MaintenanceOperator(task_id="keep", postgres_conn_id="shop", saga_retention="30 days")
    assert "sagas: forgot 1 that ended more than 30 days ago" in run(keep)["done"]


@pytest.mark.parametrize(("refused", "ended"), [(None, "complete"), ("back", "rolled back")])
def test_a_saga_is_started_and_worked_off_by_tasks(conn_id, connection, refused, ended):
    prepare(connection)

    def do(work, kept):
        note(work, kept)
        return RollBack("full") if work.kind == "step" and work.step == refused else None

    number = run(StartSagaOperator(task_id="start", saga=TOUR, data={"tour": "7"}, postgres_conn_id="shop"))
    answers: list[dict[str, int]] = []
    for _ in range(2):
        for queue in WORKED:
            task = SagaHandlerOperator(task_id=queue, queue_name=queue, do=do, postgres_conn_id="shop")
            answers.append(run(task)["answers"])
    assert connection.execute("select id, state from mbus.sagas").fetchall() == [(number, ended)]
    assert sum(found.get("rolled back", 0) for found in answers) == (refused is not None)


def test_a_function_that_is_decorated_does_steps_with_arguments_of_its_own(conn_id, connection):
    prepare(connection)
    run(StartSagaOperator(task_id="start", saga=TOUR, data={"tour": "7"}, postgres_conn_id="shop"))
    seen = []

    def rooms(work, connection, hotel):
        seen.append((work.step, hotel))
        note(work, connection)

    with DAG("saga"):
        made = task.pgchange_saga(queue_name="rooms", postgres_conn_id="shop")(rooms)(hotel="Ritz")
    assert run(made.operator)["answers"] == {"done": 1}
    assert [hotel for _, hotel in seen] == ["Ritz"]


def handling(queue, do, **given):
    return SagaHandlerOperator(task_id=queue, queue_name=queue, do=do, postgres_conn_id="shop", **given)


def test_a_task_whose_handler_raised_works_off_the_others_and_fails(conn_id, connection):
    prepare(connection)
    for tour in ("1", "2", "3"):
        run(StartSagaOperator(task_id="start", saga=TOUR, data={"tour": tour}, postgres_conn_id="shop"))

    def do(work, kept):
        if work.data["tour"] == "2":
            raise ValueError("no answer")

    with pytest.raises(AirflowException, match="queue:rooms/default: 1 of 3 messages failed"):
        run(handling("rooms", do))
    assert connection.execute("select id from mbus.sagas where done = '{room}'").fetchall() == [(1,), (3,)]
    assert run(handling("rooms", do))["answers"] == {}


@pytest.fixture
def saga(conn_id, connection):
    prepare(connection)
    return run(StartSagaOperator(task_id="start", saga=TOUR, data={}, postgres_conn_id="shop"))


def ends(saga):
    return SagaSensor(task_id="ends", saga=str(saga), postgres_conn_id="shop").poke({})


def test_a_sensor_waits_until_a_saga_is_complete(saga, connection):
    assert not ends(saga).is_done
    connection.execute("select mbus.consume('rooms')")
    with capture_logs() as logged:
        assert not ends(saga).is_done
    assert [line["log_level"] for line in logged] == ["warning"]
    connection.execute("update mbus.saga set state = 'complete'")
    assert ends(saga).is_done


def test_a_sensor_says_how_far_a_saga_is(saga, monkeypatch):
    log = Mock()
    monkeypatch.setattr(SagaSensor, "log", log)
    ends(saga)
    (told,) = [call.args[0] % call.args[1:] for call in log.info.call_args_list]
    assert told.startswith(f"saga tour {saga}: forward; to do: room, there, ")


def test_a_sensor_fails_for_a_saga_that_was_rolled_back_or_is_none(saga, connection):
    connection.execute("select mbus.saga_roll_back('rooms.1', 'no room')")
    assert not ends(saga).is_done
    connection.execute("update mbus.saga set state = 'rolled back'")
    with pytest.raises(AirflowFailException, match="saga tour 1 was rolled back: no room"):
        ends(saga)
    with pytest.raises(AirflowFailException, match="there is no saga 7"):
        ends(7)
    with pytest.raises(InvalidArgument, match="saga must be the number of a saga"):
        ends("a tour")


def watchers():
    """Return the watchers of the queues of a saga, by their names."""
    triggers = [asset.watchers[0].trigger for asset in saga_schedule(TOUR, "shop").objects]
    return {trigger.feed.queue_name: trigger for trigger in triggers}


def test_the_handlers_of_a_saga_run_when_something_is_due_in_any_of_its_queues():
    assert watchers().keys() == set(WORKED)


async def test_a_retry_wakes_the_handlers_when_it_is_due(conn_id, connection, saga):
    def put_off(work, kept):
        return TryAgain("engaged", timedelta(seconds=1))

    assert run(handling("rooms", put_off))["answers"] == {"again": 1}
    async for event in watchers()["rooms"].run():
        assert event.payload["ready"] == 1
        break
    assert run(handling("rooms", note))["answers"] == {"done": 1}
