"""Stuck sagas: their messages are dead letters, lost or locked. And sagas that were deleted."""

from __future__ import annotations

import threading

import psycopg
import pytest

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import QueueFeed
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.messages import RollBack, start_saga
from tests import queues
from tests.conftest import database
from tests.findings import findings
from tests.queues import one
from tests.sagas import STEPS, TOUR, acts, due, failure, run, state
from tests.waiting import until, waits

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]


@pytest.fixture
def db(cluster, toured):
    yield from database(cluster, toured)


def kill_room(db):
    """Let the message of the first step fail and become a dead letter."""

    def fail(transaction, batch):
        raise ValueError("poison")

    drain(Plan(QueueFeed("rooms"), db, max_attempts=1, on_give_up="dead_letter"), fail)


def test_a_saga_whose_message_is_dead_is_named_as_stuck(db, connection):
    start_saga(connection, TOUR, {})
    kill_room(db)
    assert "step of room: message rooms.1 is among the dead letters" in state(connection)["stuck"]
    dead_letters.redrive(connection, consumer="queue:rooms/default")
    assert state(connection)["stuck"] is None
    run(db)
    assert state(connection)["state"] == "complete"


def test_a_saga_is_not_complete_without_a_step_whose_message_a_stranger_received(db, connection):
    start_saga(connection, TOUR, {})
    connection.execute("select mbus.consume('rooms')")
    assert "rooms.1 was received by a consumer that recorded" in state(connection)["stuck"]
    assert set(run(db)) == {"failed"}
    assert "rooms.1 before it was received or dropped, but not done" in failure(connection, "tickets.1")
    assert (state(connection)["state"], acts(connection)) == ("forward", [])
    queues.post(connection, 1, "rooms", iid="rooms.1")
    due(connection, "tickets")
    run(db)
    assert state(connection)["state"] == "complete"
    assert sorted(acts(connection)) == sorted(STEPS)


def test_of_several_lost_messages_an_error_names_the_first_by_its_iid(connection):
    start_saga(connection, TOUR, {})
    told = one(connection, "select mbus.lost_before(m) from mbus.saga_message as m where m.kind = 'end'")
    assert "message transfers.1 before it was received" in told


def test_a_saga_whose_dead_letter_was_dropped_is_undone_by_a_person(db, connection):
    start_saga(connection, TOUR, {})
    kill_room(db)
    dead_letters.drop_letters(connection, consumer="queue:rooms/default")
    assert set(run(db)) == {"failed"}
    assert "mbus.saga_roll_back('rooms.1', reason)" in failure(connection, "tickets.1")
    assert one(connection, "select mbus.saga_roll_back('rooms.1', 'no room')")
    run(db)
    assert state(connection)["state"] == "rolled back"
    assert sorted(acts(connection, "compensation")) == sorted(STEPS)


def test_a_saga_is_not_rolled_back_without_a_compensation_that_a_stranger_received(db, connection):
    start_saga(connection, TOUR, {})
    run(db, lambda work, kept: RollBack("full"), ["rooms"])
    connection.execute("select mbus.consume('cancel_rooms')")
    assert run(db).count("failed") == 1
    assert "message cancel_rooms.1 before it" in failure(connection, "tour_rolled_back.1")
    assert state(connection)["state"] == "rolling back"
    assert "cancel_rooms.1 was received by a consumer" in state(connection)["stuck"]


def test_only_a_step_rolls_back(connection):
    start_saga(connection, TOUR, {})
    compensation = one(connection, "select min(iid) from mbus.saga_message where kind = 'compensation'")
    assert one(connection, "select mbus.saga_roll_back(%s, 'why')", compensation) is False
    assert state(connection)["state"] == "forward"


def test_a_rollback_waits_for_the_bung(db, connection, connect):
    start_saga(connection, TOUR, {})
    holder = connect(autocommit=False)
    bung = one(connection, "select iid from mbus.saga_message where kind = 'bung'")
    holder.execute("select mbus.take(%s)", [bung])
    roller = threading.Thread(target=run, args=(db, lambda work, kept: RollBack("full"), ["rooms"]))
    roller.start()
    until(connection, waits(kind="advisory", seconds=0.3))
    holder.rollback()
    roller.join()
    run(db)
    assert state(connection)["state"] == "rolled back"


def test_sagas_that_ended_are_forgotten_in_time(db, connection):
    start_saga(connection, TOUR, {})
    run(db)
    open_one = start_saga(connection, TOUR, {})
    assert one(connection, "select mbus.forget_sagas('1 hour')") == 0
    assert one(connection, "select mbus.forget_sagas('0')") == 1
    assert connection.execute("select id from mbus.sagas").fetchall() == [(open_one,)]
    with pytest.raises(psycopg.Error, match="by a negative age"):
        connection.execute("select mbus.forget_sagas('-1 hour')")


def test_maintenance_forgets_sagas_if_told_how_old(db, connection):
    start_saga(connection, TOUR, {})
    run(db)
    assert "sagas:" not in " ".join(maintain(connection).done)
    assert "sagas: forgot 1 that ended more than 0 s ago" in maintain(connection, saga_retention="0 s").done


def test_a_role_that_maintains_queues_sees_and_deletes_sagas(db, connection, role, connect_to):
    start_saga(connection, TOUR, {})
    run(db)
    start_saga(connection, TOUR, {})
    keeper = role("maintenance")
    connection.execute("select mbus.grant_maintainer(%s::regrole)", [keeper.name])
    maintainer = connect_to(keeper.conninfo)
    assert one(maintainer, "select mbus.forget_sagas('0')") == 1
    assert maintainer.execute("select state, stuck from mbus.sagas").fetchall() == [("forward", None)]


def test_looking_for_trouble_does_not_look_at_sagas_that_ended(db, connection):
    for _ in range(3):
        start_saga(connection, TOUR, {})
    run(db)
    start_saga(connection, TOUR, {})
    connection.execute("set track_functions = 'all'")
    assert findings(connection, "mbus") == []
    connection.execute("select pg_stat_force_next_flush()")
    calls = "select calls from pg_stat_user_functions where schemaname = 'mbus' and funcname = 'saga_trouble'"
    assert one(connection, calls) == 1


def test_a_saga_goes_on_though_a_queue_of_its_other_half_is_gone(db, connection):
    start_saga(connection, TOUR, {})
    connection.execute("select mbus.drop_queue('cancel_transfers')")
    run(db, queue_names=[queue for queue in TOUR.queues if queue not in ("bungs", "cancel_transfers")])
    assert state(connection)["state"] == "complete"


def test_a_message_of_a_queue_that_was_made_anew_is_no_step_of_an_older_saga(db, connection):
    start_saga(connection, TOUR, {})
    connection.execute("select mbus.drop_queue('rooms')")
    queues.make(connection, "rooms")
    queues.post(connection, "stranger", "rooms")
    assert run(db, queue_names=["rooms"]) == ["over"]
    assert state(connection)["to_do"][0] == "room"


def test_a_saga_whose_queue_was_dropped_goes_on_with_the_message_that_a_person_posts_again(db, connection):
    start_saga(connection, TOUR, {})
    connection.execute("select mbus.drop_queue('rooms')")
    queues.make(connection, "rooms")
    queues.post(connection, "again", "rooms", iid="rooms.1")
    run(db)
    assert state(connection)["state"] == "complete"


def test_a_saga_starts_though_a_queue_of_an_older_one_was_made_anew(connection):
    start_saga(connection, TOUR, {})
    connection.execute("select mbus.drop_queue('bungs')")
    queues.make(connection, "bungs")
    assert start_saga(connection, TOUR, {}) == 2


def test_a_saga_cannot_start_in_queues_that_are_not_there(connection):
    connection.execute("select mbus.drop_queue('bungs')")
    with pytest.raises((InvalidArgument, psycopg.Error), match="No such queue: bungs"):
        start_saga(connection, TOUR, {})
