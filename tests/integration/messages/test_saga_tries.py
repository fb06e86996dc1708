"""Sagas whose steps fail: all attempts count, a saga has a deadline, and stuck sagas are reported."""

from __future__ import annotations

import logging
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin.consumers import status
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import InvalidArgument, Stopped
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.messages import RollBack, Saga, Step, TryAgain, handle_saga, queues, start_saga
from tests.conftest import database
from tests.queues import one
from tests.sagas import STEPS, TOUR, acts, due, note, run, state
from tests.waiting import until

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]

ROOMS = QueueFeed("rooms")


@pytest.fixture
def db(cluster, toured):
    yield from database(cluster, toured)


def fail(work, kept):
    note(work, kept)
    if work.kind == "step" and work.step == "room":
        raise ValueError("no answer")


def run_to_the_end(db, connection, do, **options):
    answers = []
    while (more := run(db, do, **options)) and len(answers) < 50:
        answers += more
        due(connection, "rooms")
    return answers


def kill_a_handler(db, connection, do=lambda: None):
    """Kill the process of a handler while it has the message of the first step."""
    with pytest.raises(psycopg.Error), ConsumerTransaction(ROOMS, db) as transaction:
        transaction.claim(1)
        connection.execute("select pg_terminate_backend(%s)", [transaction.connection.info.backend_pid])
        transaction.connection.execute("select 1")


def test_a_step_that_raises_is_tried_again_and_then_rolled_back(db, connection, caplog):
    start_saga(connection, TOUR, {})
    answers = run_to_the_end(db, connection, fail, max_attempts=3)
    assert (answers.count("failed"), answers.count("rolled back")) == (2, 1)
    assert state(connection)["state"] == "rolled back"
    assert one(connection, "select reason from mbus.saga") == "ValueError: no answer"
    assert acts(connection) == []
    assert sorted(acts(connection, "compensation")) == sorted(STEPS)
    assert [record.exc_info[0] for record in caplog.records if record.levelno == logging.ERROR] == [
        ValueError
    ] * 3


def test_a_statement_that_fails_counts_as_any_failure(db, connection):
    def divide(work, kept):
        kept.execute("select 1 / 0")

    start_saga(connection, TOUR, {})
    assert run(db, divide, max_attempts=1).count("rolled back") == 1
    assert "division by zero" in one(connection, "select reason from mbus.saga")


def test_the_error_of_a_step_is_kept_without_the_password_of_its_connection(db, connection):
    def tell(work, kept):
        raise ValueError(f"refused: {kept.info.password!r}")

    start_saga(connection, TOUR, {})
    run(make_conninfo(db, password="p'w d"), tell, max_attempts=1)
    assert one(connection, "select reason from mbus.saga") == 'ValueError: refused: "***"'


def test_a_handler_that_died_has_tried(db, connection):
    tries = []
    start_saga(connection, TOUR, {})
    kill_a_handler(db, connection)
    kill_a_handler(db, connection)

    def do(work, kept):
        if work.step == "room":
            tries.append(work.attempt)
            return TryAgain("engaged", timedelta()) if work.attempt < 5 else None
        return None

    run(db, do)
    assert tries == [3, 4, 5]
    assert state(connection)["state"] == "complete"


def test_a_step_whose_handlers_died_too_often_is_not_tried_again(db, connection):
    start_saga(connection, TOUR, {})
    for _ in range(2):
        kill_a_handler(db, connection)
    assert run(db, max_attempts=2).count("rolled back") == 1
    assert acts(connection) == []
    assert state(connection)["state"] == "rolled back"


def test_a_failure_comes_after_a_pause_so_that_other_sagas_go_on(db, connection):
    start_saga(connection, TOUR, {"bad": "yes"})
    start_saga(connection, TOUR, {})

    def do(work, kept):
        if "bad" in work.data and work.step == "room":
            raise ValueError("no answer")

    assert run(db, do).count("failed") == 1
    states = "select state from mbus.saga order by id"
    assert connection.execute(states).fetchall() == [("forward",), ("complete",)]


def test_a_compensation_that_raises_is_tried_again(db, connection):
    failed = []

    def do(work, kept):
        if work.kind == "step":
            return RollBack("full")
        if work.step == "room" and not failed:
            failed.append(work.attempt)
            raise ValueError("no answer")
        return None

    start_saga(connection, TOUR, {})
    run(db, do, max_attempts=1)
    assert "at try" not in (state(connection)["stuck"] or "")
    due(connection, "cancel_rooms")
    run(db, do, max_attempts=1)
    assert state(connection)["state"] == "rolled back"


def test_a_lost_connection_is_no_failure_of_the_step(db, connection):
    start_saga(connection, TOUR, {})

    def lose(work, kept):
        connection.execute("select pg_terminate_backend(%s)", [kept.info.backend_pid])
        kept.execute("select 1")

    with pytest.raises(Exception, match="terminat|lost|closed"):
        run(db, lose, ["rooms"], max_attempts=2)
    assert state(connection)["state"] == "forward"
    assert run(db, note, ["rooms"], max_attempts=2) == ["done"]


def test_a_deadlock_is_no_failure_of_the_step(db, connection):
    tries = []

    def lose_once(work, kept):
        tries.append(work.attempt)
        if len(tries) == 1:
            kept.execute("do $$ begin raise exception using errcode = 'deadlock_detected'; end $$")

    start_saga(connection, TOUR, {})
    assert run(db, lose_once, ["rooms"]) == ["done"]
    assert tries == [1, 1]


def test_a_step_that_was_stopped_has_not_failed(db, connection):
    def stop(work, kept):
        raise Stopped("the task was killed")

    start_saga(connection, TOUR, {})
    with pytest.raises(Stopped):
        run(db, stop, ["rooms"])


def test_a_saga_that_fails_again_and_again_is_named(db, connection):
    start_saga(connection, TOUR, {})
    for _ in range(4):
        kill_a_handler(db, connection)
    assert (
        "step of room: message rooms.1 is at try 4 of consumer default: its handler ended without an error message"
        in state(connection)["stuck"]
    )
    told = []
    status(connection, warn=told.append)
    assert [line for line in told if line.startswith("saga tour 1 is stuck: step of room")]
    assert [line for line in maintain(connection).attention if line.startswith("saga tour 1 is stuck: ")]


def overdue(connection):
    connection.execute(
        "update mbus.saga set started_at = now() - interval '1 day', deadline = clock_timestamp()"
    )


def test_a_saga_has_a_deadline(connection):
    start_saga(connection, TOUR, {})
    assert one(connection, "select deadline - started_at < interval '1 day 1 minute' from mbus.saga")
    start_saga(connection, Saga("tour", TOUR.steps, timeout=timedelta(hours=2)), {})
    assert one(
        connection, "select deadline - started_at < interval '2 hours 1 minute' from mbus.saga where id = 2"
    )
    start_saga(connection, Saga("tour", TOUR.steps, timeout=None), {})
    assert one(connection, "select deadline is null from mbus.saga where id = 3")


@pytest.mark.parametrize("timeout", [timedelta(), timedelta(seconds=-1), "soon"])
def test_a_deadline_lies_ahead(timeout):
    with pytest.raises(InvalidArgument, match="saga s: timeout must be a length of time"):
        Saga("s", (Step("a", "q", "c"),), timeout=timeout)


def test_a_saga_that_nobody_works_off_is_rolled_back_by_maintenance_after_its_deadline(db, connection):
    start_saga(connection, TOUR, {})
    run(db, queue_names=["rooms"])
    overdue(connection)
    assert "its deadline was at" in state(connection)["stuck"]
    report = maintain(connection)
    assert any(line.startswith("sagas: rolled back tour 1: its deadline was at") for line in report.done)
    run(db)
    assert (state(connection)["state"], acts(connection)) == ("rolled back", ["room"])
    assert sorted(acts(connection, "compensation")) == sorted(STEPS)


def test_a_step_that_comes_after_the_deadline_is_not_done(db, connection):
    start_saga(connection, TOUR, {})
    overdue(connection)
    assert run(db).count("rolled back") == 1
    assert acts(connection) == []


def test_a_saga_whose_steps_are_all_done_ends_however_late(db, connection):
    start_saga(connection, TOUR, {})
    run(db, queue_names=["rooms", "tickets", "transfers"])
    overdue(connection)
    assert "its deadline was at" in state(connection)["stuck"]
    maintain(connection)
    assert state(connection)["state"] == "forward"
    run(db)
    assert state(connection)["state"] == "complete"


def test_a_step_in_hand_when_its_saga_is_rolled_back_by_maintenance_is_not_kept(db, connection):
    start_saga(connection, TOUR, {})
    answers = []

    def meanwhile(work, kept):
        note(work, kept)
        overdue(connection)
        assert one(connection, "select mbus.roll_back_overdue()") is not None

    with ConsumerTransaction(ROOMS, db) as slow:
        slow.claim(1)
        (message,) = slow.changes()
        slow.ack(lambda kept: answers.append(handle_saga(kept, message, meanwhile)))
    assert (answers, acts(connection)) == (["over"], [])
    run(db)
    assert state(connection)["state"] == "rolled back"


def test_a_saga_is_not_rolled_back_between_the_end_of_a_step_and_its_commit(db, connection):
    """Otherwise the compensation would find that the step was not done, and the step's commit would come later."""
    start_saga(connection, TOUR, {})
    overdue(connection)
    connection.execute("set lock_timeout = '10s'")
    rolled_back = []

    def end_while_maintenance_runs(kept):
        assert one(kept, "select mbus.saga_done('rooms.1')")
        rolled_back.extend(connection.execute("select mbus.roll_back_overdue()").fetchall())

    with ConsumerTransaction(ROOMS, db) as slow:
        slow.claim(1)
        slow.ack(end_while_maintenance_runs)
    assert rolled_back == []
    assert connection.execute("select mbus.roll_back_overdue()").fetchall() != []


def test_a_saga_that_is_not_undone_in_time_is_named(connection):
    start_saga(connection, TOUR, {})
    connection.execute("select mbus.saga_roll_back('rooms.1', 'no')")
    assert state(connection)["stuck"] is None
    connection.execute(
        "update mbus.saga set started_at = now() - interval '3 days', deadline = now() - interval '2 days', "
        "changed_at = now() - interval '2 days'"
    )
    assert "is not undone after" in state(connection)["stuck"]


def test_what_nobody_would_receive_of_a_saga_is_a_failure_that_is_told(db, connection):
    connection.execute("select mbus.create_consumer('fresh', 'rooms', $$not exist(t.properties, 'tries')$$)")
    connection.execute("select mbus.drop_consumer('default', 'rooms')")
    start_saga(connection, TOUR, {})
    feed, refused = QueueFeed("rooms", "fresh"), r"message rooms\.1 cannot be put back"
    with pytest.raises(InvalidArgument, match=refused), ConsumerTransaction(feed, db) as transaction:
        transaction.claim(1)
        (message,) = transaction.changes()
        transaction.ack(lambda kept: handle_saga(kept, message, lambda *_: TryAgain("engaged")) and None)
    until(connection, "select count(*) = 1 from mbus.batch where error like '%nobody would receive%'")


def test_a_saga_is_seen_by_who_may_use_its_queues(db, connection, role, connect_to):
    start_saga(connection, TOUR, {})
    who = role("user")
    connection.execute(f"grant usage on schema mbus to {who.name}")
    connection.execute(f"grant execute on function mbus.saga_state(bigint), mbus.stuck_sagas() to {who.name}")
    session = connect_to(who.conninfo)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="Access denied"):
        session.execute("select mbus.saga_state(1)")
    overdue(connection)
    assert session.execute("select mbus.stuck_sagas()").fetchall() == []
    connection.execute(f"grant execute on function mbus.post_rooms to {who.name}")
    found = one(session, "select mbus.saga_state(1)")
    assert (found["name"], found["state"], "its deadline was" in found["stuck"]) == ("tour", "forward", True)
    assert one(session, "select mbus.saga_state(7)") is None
    assert queues.stuck_sagas(session) != []
