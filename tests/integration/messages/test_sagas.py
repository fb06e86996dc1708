"""Sagas: all steps are done or all are undone, in a valid order, and no step twice."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.messages import (
    RollBack,
    Saga,
    Step,
    TryAgain,
    create_saga_queues,
    handle_saga,
    start_saga,
)
from tests import queues
from tests.conftest import database
from tests.queues import one
from tests.sagas import STEPS, TOUR, WORKED, acts, note, run, state

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]


@pytest.fixture
def db(cluster, toured):
    yield from database(cluster, toured)


def left(connection):
    """The queues that still have messages."""
    return {queue for queue in TOUR.queues if queues.there(connection, queue)}


def refuse(*steps):
    def do(work, connection):
        note(work, connection)
        return RollBack("full") if work.kind == "step" and work.step in steps else None

    return do


def test_steps_that_wait_for_each_other_are_refused():
    steps = (Step("a", "qa", "ca", after=("b",)), Step("b", "qb", "cb", after=("a",)))
    with pytest.raises(InvalidArgument, match=r"wait for each other: (a -> b -> a|b -> a -> b)"):
        Saga("s", steps)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "it needs steps"),
        ((Step("a", "q", "c"), Step("a", "q", "c")), "a name of its own"),
        ((Step("a", "q"),), "step a has no compensation"),
        ((Step("a", "q", "c", lasting=True),), "cannot be lasting"),
        ((Step("a", "q", "c", after=("b",)),), "`after` of step a names b"),
        ((Step("a", "Q", "c"),), "not a valid name of a queue"),
        ((Step("a", "bungs", "c"),), "nobody may consume from bungs"),
    ],
)
def test_an_invalid_saga_is_refused(steps, message):
    with pytest.raises(InvalidArgument, match=message):
        Saga("s", steps)


@pytest.mark.parametrize("end", ["end", "rolled_back"])
def test_no_end_is_in_the_queue_from_which_nobody_consumes(end):
    with pytest.raises(InvalidArgument, match="nobody may consume from bungs"):
        Saga("s", (Step("a", "q", "c"),), **{end: "bungs"})


STEP = {"name": "a", "queue": "rooms", "compensation": "cancel_rooms", "after": []}


@pytest.mark.parametrize(
    "steps", [[STEP, STEP], [{**STEP, "after": ["b"]}, {**STEP, "name": "b"}], [{**STEP, "name": None}]]
)
def test_steps_that_do_not_stand_in_their_order_are_refused_in_sql(connection, steps):
    with pytest.raises(psycopg.Error, match="step .* appears twice, or before a step"):
        connection.execute("select mbus.start_saga(%s, '')", [Jsonb({**TOUR.description(), "steps": steps})])
    assert left(connection) == set()


def test_a_saga_whose_compensations_would_wait_for_nothing_is_refused(connection):
    connection.execute("select mbus.drop_consumer('default', 'bungs')")
    with pytest.raises(InvalidArgument, match="nothing waits behind a message of queue bungs"):
        start_saga(connection, TOUR, {})


def test_a_step_may_be_lasting_if_it_says_so(connection):
    saga = Saga("mail", (Step("send", "mails", lasting=True),))
    create_saga_queues(connection, saga)
    assert start_saga(connection, saga, {}) == 1


def test_a_start_posts_both_sequences_with_the_bung_and_the_end(connection):
    start_saga(connection, TOUR, {"tour_id": "7"})
    iids = {
        (kind, step): iid
        for kind, step, iid in connection.execute("select kind, step, iid from mbus.saga_message").fetchall()
    }
    compensations = {iids["compensation", step] for step in STEPS}
    bung, end, rolled_back = iids["bung", None], iids["end", None], iids["rolled back", None]

    def header(kind, step=None):
        query = "select (m.headers -> 'consume_after')::text[] from mbus.peek(%s) as m"
        return set(queues.one(connection, query, iids[kind, step]) or [])

    def to_take(iid):
        return set(
            queues.one(
                connection, "select (m.properties -> 'id_to_take')::text[] from mbus.peek(%s) as m", iid
            )
        )

    assert header("step", "room") == set()
    assert header("step", "back") == {iids["step", "room"]}
    assert header("step", "transfer_from") == {iids["step", "back"]}
    assert header("end") == {iids["step", "transfer_to"], iids["step", "transfer_from"]}
    assert all(header("compensation", step) == {bung} for step in STEPS)
    assert header("rolled back") == compensations | {bung}
    assert to_take(bung) == {iids["step", step] for step in STEPS} | {end}
    assert to_take(end) == compensations | {rolled_back, bung}
    link = "select m.properties -> 'bung', m.data -> 'tour_id' from mbus.peek(%s) as m"
    for forward in [iids["step", step] for step in STEPS] + [end]:
        assert connection.execute(link, [forward]).fetchone() == (bung, "7")


def test_a_start_that_is_rolled_back_never_was(connect, connection):
    writer = connect(autocommit=False)
    start_saga(writer, TOUR, {})
    writer.rollback()
    assert left(connection) == set()
    assert connection.execute("select count(*) from mbus.saga").fetchone() == (0,)


def test_all_steps_are_done_in_order_and_nothing_is_left(db, connection):
    start_saga(connection, TOUR, {"tour_id": "7"})
    assert set(run(db)) == {"done"}
    done = acts(connection)
    assert (done[0], set(done), len(done)) == ("room", STEPS, 5)
    assert done.index("there") < done.index("transfer_to")
    assert done.index("back") < done.index("transfer_from")
    assert (acts(connection, "compensation"), acts(connection, "end")) == ([], [None])
    assert state(connection)["state"] == "complete"
    assert left(connection) == set()


def test_steps_that_do_not_wait_for_each_other_are_ready_at_once(db, connection):
    start_saga(connection, TOUR, {})
    run(db, queue_names=["rooms"])
    with (
        ConsumerTransaction(QueueFeed("tickets"), db) as there,
        ConsumerTransaction(QueueFeed("tickets"), db) as back,
    ):
        assert there.claim(1) is not None
        assert back.claim(1) is not None
        there.ack()
        back.ack()


REFUSED_ELSEWHERE = pytest.mark.release("test_saga_traffic.py has each step refused too")


@pytest.mark.parametrize(
    "step",
    [
        "room",
        "transfer_to",
        *[pytest.param(step, marks=REFUSED_ELSEWHERE) for step in ("there", "back", "transfer_from")],
    ],
)
def test_a_step_that_cannot_be_done_undoes_all(db, connection, step):
    start_saga(connection, TOUR, {})
    assert run(db, refuse(step)).count("rolled back") == 1
    assert step not in acts(connection)
    assert sorted(acts(connection, "compensation")) == sorted(STEPS)
    assert (acts(connection, "end"), acts(connection, "rolled back")) == ([], [None])
    found = state(connection)
    assert (found["state"], set(found["undone"]), found["to_undo"], found["stuck"]) == (
        "rolled back",
        STEPS,
        [],
        None,
    )
    assert left(connection) == set()


def test_a_compensation_is_told_whether_its_step_was_done(db, connection):
    told: dict[str, bool] = {}

    def do(work, kept):
        if work.kind == "compensation":
            told[work.step] = work.was_done
            assert work.reason == "full"
        return RollBack("full") if work.kind == "step" and work.step == "there" else None

    start_saga(connection, TOUR, {})
    run(db, do, queue_names=["rooms", *[queue for queue in WORKED if queue != "rooms"]])
    assert told["room"] is True
    assert told["there"] is False


def test_a_step_is_tried_again_with_a_count_and_what_it_wrote_is_not_kept(db, connection):
    tries: list[int] = []

    def do(work, kept):
        note(work, kept)
        if work.step == "room":
            tries.append(work.attempt)
            return TryAgain("engaged", timedelta()) if work.attempt < 3 else None
        return None

    start_saga(connection, TOUR, {})
    assert run(db, do).count("again") == 2
    assert tries == [1, 2, 3]
    assert sorted(acts(connection)) == sorted(STEPS)
    assert state(connection)["state"] == "complete"


def test_a_step_that_was_tried_too_often_undoes_all(db, connection):
    start_saga(connection, TOUR, {})
    answers = run(
        db,
        lambda work, kept: (
            TryAgain("engaged", timedelta()) if work.step == "room" and work.kind == "step" else None
        ),
        max_attempts=3,
    )
    assert (answers.count("again"), answers.count("rolled back")) == (2, 1)
    assert state(connection)["state"] == "rolled back"


def test_a_compensation_cannot_be_rolled_back(db, connection):
    def do(work, kept):
        return RollBack("never")

    start_saga(connection, TOUR, {})
    assert set(run(db, do)) == {"rolled back", "failed"}
    assert state(connection)["state"] == "rolling back"
    errors = "select distinct error from mbus.saga_message where kind = 'compensation'"
    assert "a compensation cannot be rolled back, as its handler asked (never)" in one(connection, errors)


def test_another_answer_than_those_that_there_are_is_a_failure_and_keeps_nothing(db, connection):
    def do(work, kept):
        note(work, kept)
        return True

    start_saga(connection, TOUR, {})
    assert run(db, do) == ["failed"]
    error = one(connection, "select error from mbus.saga_message where tries = 2")
    assert "the handler answered True: None says that it is done" in error
    assert connection.execute("select count(*) from act").fetchone() == (0,)


def test_a_step_in_work_when_the_saga_is_rolled_back_commits_nothing(db, connection):
    start_saga(connection, TOUR, {})
    run(db, queue_names=["rooms"])
    answers: list[str] = []

    def meanwhile(work, kept):
        note(work, kept)
        with ConsumerTransaction(QueueFeed("tickets"), db) as fast:
            fast.claim(1)
            (change,) = fast.changes()
            fast.ack(lambda other: answers.append(handle_saga(other, change, lambda *_: RollBack("full"))))

    with ConsumerTransaction(QueueFeed("tickets"), db) as slow:
        slow.claim(1)
        (message,) = slow.changes()
        slow.ack(lambda kept: answers.append(handle_saga(kept, message, meanwhile)))
    assert answers == ["rolled back", "over"]
    assert acts(connection) == ["room"]
    run(db)
    assert state(connection)["state"] == "rolled back"
    assert left(connection) == set()


def handled_in_one_batch(db, queue, do):
    """Handle everything that is ready in a queue, in one batch. Return the outcomes in order."""
    answers = []
    with ConsumerTransaction(QueueFeed(queue), db) as transaction:
        transaction.claim(100)
        transaction.ack(
            lambda kept: answers.extend(handle_saga(kept, change, do) for change in transaction.changes())
        )
    return answers


@pytest.mark.parametrize(
    ("answers", "became"),
    [
        ({"there": RollBack("full")}, ["rolled back", "over"]),
        ({"back": RollBack("full")}, ["done", "rolled back"]),
        ({"there": TryAgain("engaged"), "back": RollBack("full")}, ["again", "rolled back"]),
    ],
)
def test_two_steps_of_a_saga_in_one_batch_are_undone_together(db, connection, answers, became):
    start_saga(connection, TOUR, {})
    run(db, queue_names=["rooms"])

    def do(work, kept):
        answer = answers.get(work.step) if work.kind == "step" else None
        return answer or note(work, kept)

    assert handled_in_one_batch(db, "tickets", do) == became
    run(db)
    assert (state(connection)["state"], left(connection)) == ("rolled back", set())
    done = {"room"} | {step for step in ("there", "back") if step not in answers and "done" in became}
    assert set(acts(connection)) == done


def test_a_message_of_no_saga_is_over(db, connection):
    queues.post(connection, 1, "rooms")
    assert run(db, queue_names=["rooms"]) == ["over"]
