"""Sagas continue beside a failing saga, whatever its handlers do and whatever happened to its messages."""

from __future__ import annotations

import re
from datetime import timedelta

import psycopg
import pytest

from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.messages import RollBack, Saga, Step, TryAgain, start_saga
from tests import queues
from tests.conftest import database
from tests.queues import one
from tests.sagas import STEPS, TOUR, acts, due, failure, note, run, state

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]


@pytest.fixture
def db(cluster, toured):
    yield from database(cluster, toured)


def states(connection):
    rows = connection.execute("select state from mbus.saga order by id").fetchall()
    return [row[0] for row in rows]


def of_the_bad(do):
    """Return a handler that calls ``do`` for the first step of the bad saga."""

    def handler(work, kept):
        return do(work, kept) if "bad" in work.data and work.step == "room" else note(work, kept)

    return handler


def two(connection):
    start_saga(connection, TOUR, {"bad": "yes"})
    start_saga(connection, TOUR, {})


def test_the_batches_of_other_consumers_are_no_tries_of_a_step(db, connection):
    connection.execute("select mbus.create_consumer('audit', 'rooms')")
    start_saga(connection, TOUR, {})
    for _ in range(6):
        with pytest.raises(ZeroDivisionError), ConsumerTransaction(QueueFeed("rooms", "audit"), db) as audit:
            audit.claim(1)
            raise ZeroDivisionError
    assert "message rooms.1 is at try 6 of consumer audit" in state(connection)["stuck"]
    tries = []
    assert run(db, lambda work, kept: tries.append(work.attempt), ["rooms"], max_attempts=5) == ["done"]
    assert tries == [1]


def test_a_deferred_constraint_that_a_step_violates_is_a_failure_of_the_step(db, connection):
    connection.execute(
        "create table parent (id int primary key); "
        "create table child (id int references parent deferrable initially deferred)"
    )
    two(connection)
    assert run(db, of_the_bad(lambda work, kept: kept.execute("insert into child values (7)") and None))
    assert states(connection) == ["forward", "complete"]
    assert "violates foreign key constraint" in failure(connection, "rooms.1")


def test_a_deferred_constraint_that_a_step_satisfies_in_the_end_is_no_failure(db, connection):
    connection.execute(
        "create table parent (id int primary key); "
        "create table child (id int references parent deferrable initially deferred)"
    )
    two(connection)

    def do(work, kept):
        kept.execute("insert into child values (7)")
        kept.execute("insert into parent values (7)")

    run(db, of_the_bad(do))
    assert states(connection) == ["complete", "complete"]


BAD_ANSWERS = {
    TryAgain("engaged", timedelta.max): "delay must be a length of time from 0 s to 36525 days",
    TryAgain("engaged", timedelta(days=-1)): "delay must be a length of time from 0 s to 36525 days",
    TryAgain("engaged", "soon"): "delay must be a length of time .*, not 'soon'",
    TryAgain("a\0b"): r"reason must be a text .*, not 'a\\x00b'",
    RollBack("a\0b"): r"reason must be a text .*, not 'a\\x00b'",
    RollBack("\udc80"): r"reason must be a text .*, not '\\udc80'",
    TryAgain(None): "reason must be a text .*, not None",  # type: ignore[arg-type]
    RollBack(7): "reason must be a text .*, not 7",  # type: ignore[arg-type]
}


def test_an_answer_that_cannot_be_kept_is_a_failure_of_its_step(db, connection):
    """Each answer is given in a saga of its own. Another saga, whose steps succeed, waits behind them."""
    answers = list(BAD_ANSWERS)
    for number in range(len(answers)):
        start_saga(connection, TOUR, {"bad": str(number)})
    start_saga(connection, TOUR, {})
    done = run(db, of_the_bad(lambda work, kept: answers[int(work.data["bad"])]))
    assert done.count("failed") == len(answers)
    assert states(connection) == ["forward"] * len(answers) + ["complete"]
    for number, answer in enumerate(answers, 1):
        assert re.search(BAD_ANSWERS[answer], failure(connection, f"rooms.{number}")), answer


def test_an_error_with_any_text_is_a_failure_of_its_step(db, connection):
    def fail(work, kept):
        raise ValueError("bad byte \0 here")

    two(connection)
    assert run(db, of_the_bad(fail)).count("failed") == 1
    assert states(connection) == ["forward", "complete"]


def test_a_saga_that_a_person_rolls_back_takes_no_other_with_it(connection):
    two(connection)
    connection.execute("select mbus.saga_roll_back('rooms.1', 'no room')")
    assert states(connection) == ["rolling back", "forward"]


def test_a_saga_that_lost_a_message_waits_and_the_others_go_on(db, connection):
    two(connection)
    queues.consume(connection, queue="rooms")
    assert run(db, note, max_attempts=1).count("failed") == 2
    assert states(connection) == ["forward", "complete"]
    assert "message rooms.1 before it was received" in failure(connection, "tickets.1")
    queues.post(connection, 1, "rooms", iid="rooms.1")
    due(connection, "tickets")
    run(db, max_attempts=1)
    assert states(connection) == ["complete", "complete"]
    assert sorted(acts(connection)) == sorted([*STEPS, *STEPS])


def test_nothing_is_done_behind_a_message_that_was_lost(connection):
    two(connection)
    queues.consume(connection, queue="rooms")
    with pytest.raises(psycopg.Error, match=r"message rooms\.1 before it was received") as refused:
        connection.execute("select mbus.saga_done('tickets.1')")
    assert refused.value.sqlstate == "PC008"


def test_a_saga_that_lost_a_compensation_waits_and_the_others_go_on(db, connection):
    two(connection)
    run(db, of_the_bad(lambda work, kept: RollBack("full")), ["rooms"])
    queues.take(connection, "cancel_rooms.1")
    assert run(db).count("failed") == 1
    assert states(connection) == ["rolling back", "complete"]


@pytest.mark.parametrize("behind", ["tickets", "tour_end"])
def test_a_saga_that_lost_a_message_ends_at_its_deadline(db, connection, behind):
    start_saga(connection, TOUR, {})
    lost = "transfers.1"
    if behind == "tickets":
        lost = "rooms.1"
    else:
        run(db, queue_names=["rooms", "tickets"])
    queues.take(connection, lost)
    connection.execute(
        "update mbus.saga set started_at = now() - interval '1 day', deadline = clock_timestamp()"
    )
    queue_names = [behind] if behind == "tickets" else ["transfers", behind]
    assert "rolled back" in run(db, queue_names=queue_names)
    run(db)
    assert state(connection)["state"] == "rolled back"
    assert "its deadline was at" in one(connection, "select reason from mbus.saga")


def test_a_deadline_is_one_that_a_database_can_hold():
    with pytest.raises(
        Exception, match="saga s: timeout must be a length of time from 1e-06 s to 36525 days"
    ):
        Saga("s", (Step("a", "q", "c"),), timeout=timedelta.max)


def test_a_handler_that_commits_or_rolls_back_its_transaction_fails_and_the_others_go_on(db, connection):
    for end in ("commit", "rollback"):
        start_saga(connection, TOUR, {"bad": end})
    start_saga(connection, TOUR, {})
    assert run(db, of_the_bad(lambda work, kept: getattr(kept, work.data["bad"])())).count("failed") == 2
    assert states(connection) == ["forward", "forward", "complete"]


def test_a_statement_that_ends_the_transaction_of_a_step_loses_the_batch_and_nothing_else(db, connection):
    start_saga(connection, TOUR, {})
    with pytest.raises(psycopg.Error):
        run(db, lambda work, kept: kept.execute("commit") and None, ["rooms"])
    run(db)
    assert state(connection)["state"] == "complete"
