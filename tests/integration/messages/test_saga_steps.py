"""The state of sagas and their steps, as people see it."""

from __future__ import annotations

import pytest

from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.messages import RollBack, TryAgain, start_saga
from tests.conftest import database
from tests.queues import consume, one
from tests.sagas import TOUR, due, run

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]


@pytest.fixture
def db(cluster, toured):
    yield from database(cluster, toured)


@pytest.fixture
def saga(connection):
    return start_saga(connection, TOUR, {"tour_id": "7"})


def states(connection, saga):
    """Return the state of each step of a saga."""
    return dict(connection.execute("select step, state from mbus.saga_steps(%s)", [saga]).fetchall())


def latest(connection, *names, most=100):
    return connection.execute(f"select {', '.join(names)} from mbus.latest_sagas(%s)", [most]).fetchall()


def answering(**answers):
    """Return a handler that gives these answers for some steps, and does the others."""
    return lambda work, _: answers.get(work.step) if work.kind == "step" else None


def test_a_step_waits_until_its_turn_has_come_and_is_in_work_until_it_is_done(db, connection, saga):
    waiting = {"there": "waiting", "back": "waiting", "transfer_to": "waiting", "transfer_from": "waiting"}
    assert states(connection, saga) == {"room": "ready", **waiting}
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(QueueFeed("rooms"), db) as transaction:
        transaction.claim(1)
        assert states(connection, saga) == {"room": "in work", **waiting}
        raise ZeroDivisionError
    assert states(connection, saga) == {"room": "ready", **waiting}
    run(db, queue_names=["rooms"])
    assert states(connection, saga) == {**waiting, "room": "done", "there": "ready", "back": "ready"}
    assert latest(connection, "id", "name", "state", "steps", "done", "at") == [
        (saga, "tour", "forward", 5, 1, ["there", "back"])
    ]


def test_a_saga_that_is_complete_is_at_no_step(db, connection, saga):
    run(db)
    assert set(states(connection, saga).values()) == {"done"}
    assert latest(connection, "state", "done", "at", "stuck") == [("complete", 5, [], None)]


def test_a_refused_step_is_told_from_those_that_are_undone_and_those_that_were_left_out(db, connection, saga):
    run(db, answering(there=RollBack("full")), queue_names=["rooms", "tickets"])
    assert states(connection, saga) == {
        "room": "to compensate",
        "there": "refused",
        "back": "left out",
        "transfer_to": "left out",
        "transfer_from": "left out",
    }
    assert latest(connection, "state", "reason", "undone") == [("rolling back", "full", 0)]
    run(db)
    found = states(connection, saga)
    assert (found["room"], found["there"], found["transfer_to"]) == ("compensated", "refused", "left out")
    assert latest(connection, "state", "undone", "at") == [("rolled back", 5, [])]


def test_a_step_tells_what_it_comes_after_and_what_its_last_try_failed_on(db, connection, saga):
    run(db, answering(there=TryAgain("no seat"), back=TryAgain("no seat")), queue_names=["rooms", "tickets"])
    query = 'select "after", qname, tries, error, state from mbus.saga_steps(%s) where step = %s'
    assert connection.execute(query, [saga, "there"]).fetchone() == (
        ["room"],
        "tickets",
        2,
        "no seat",
        "ready",
    )
    assert connection.execute(query, [saga, "room"]).fetchone() == ([], "rooms", 1, None, "done")


def retries(connection, saga):
    """Return the steps that were put back, and in about how many minutes each comes again."""
    query = "select step, round(extract(epoch from due_at - now()) / 60) from mbus.saga_retries(%s)"
    return dict(connection.execute(query, [saga]).fetchall())


def test_a_step_that_is_put_back_tells_when_it_comes_again(db, connection, saga):
    assert retries(connection, saga) == {}
    run(db, answering(there=TryAgain("no seat", delay=300)), queue_names=["rooms", "tickets"])
    assert retries(connection, saga) == {"there": 5}
    due(connection, "tickets")
    assert retries(connection, saga) == {}


def test_a_compensation_that_is_put_back_tells_when_it_comes_again(db, connection, saga):
    put_back = TryAgain("the office is closed", delay=600)
    run(
        db,
        lambda work, _: (
            put_back if work.kind == "compensation" else RollBack("full") if work.step == "back" else None
        ),
        queue_names=["rooms", "tickets", "cancel_rooms"],
    )
    assert retries(connection, saga) == {"room": 10}


def test_the_retries_of_a_saga_are_told_though_another_queue_of_it_was_dropped(db, connection, saga):
    run(db, answering(there=TryAgain("no seat", delay=300)), queue_names=["rooms", "tickets"])
    connection.execute("select mbus.drop_queue('transfers')")
    assert retries(connection, saga) == {"there": 5}


def test_a_step_that_is_done_is_so_whoever_else_gave_its_message_up(db, connection):
    connection.execute("select mbus.create_consumer('audit', 'rooms')")
    saga = start_saga(connection, TOUR, {})
    run(db, queue_names=["rooms"])
    with (
        pytest.raises(ZeroDivisionError),
        ConsumerTransaction(QueueFeed("rooms", "audit"), db) as transaction,
    ):
        transaction.claim(1)
        raise ZeroDivisionError
    connection.execute("select mbus.skip_batch('rooms', 'audit', 'no use')")
    steps = dict(connection.execute("select step, iid from mbus.saga_steps(%s)", [saga]).fetchall())
    assert one(connection, "select iid from mbus.dmq") == steps["room"]
    assert states(connection, saga)["room"] == "done"
    # Later steps wait for the dead letter.
    connection.execute("select mbus.saga_roll_back(%s, 'full')", [steps["there"]])
    run(db)
    assert states(connection, saga)["room"] == "compensated"


def test_a_step_that_only_failed_a_try_is_not_what_the_saga_was_undone_for(db, connection, saga):
    run(
        db,
        answering(there=TryAgain("no seat"), back=RollBack("no seat")),
        queue_names=["rooms", "tickets"],
    )
    found = states(connection, saga)
    assert (found["there"], found["back"]) == ("left out", "refused")


def test_where_a_saga_is_is_found_out_once_for_all_its_steps(connection, saga):
    connection.execute("set track_functions = 'all'")
    with connection.transaction():
        states(connection, saga)
        calls = one(
            connection,
            "select calls from pg_stat_xact_user_functions where funcname = 'saga_at' and schemaname = 'mbus'",
        )
    assert calls == 1


def test_a_step_among_the_dead_letters_is_refused_and_the_saga_tells_why_it_is_stuck(connection, saga):
    iid = one(connection, "select iid from mbus.saga_steps(%s) where step = 'room'", saga)
    connection.execute(
        "select mbus.post_dmq(data, headers, properties, iid => iid) from mbus.take(%s)", [iid]
    )
    assert states(connection, saga)["room"] == "refused"
    ((stuck,),) = latest(connection, "stuck")
    assert "is among the dead letters" in stuck


def test_sagas_that_have_not_ended_come_first_and_then_the_latest(db, connection, saga):
    run(db)
    second = start_saga(connection, TOUR, {})
    third = start_saga(connection, TOUR, {})
    assert latest(connection, "id") == [(third,), (second,), (saga,)]
    assert latest(connection, "id", most=2) == [(third,), (second,)]


def test_the_data_of_a_saga_are_shown_while_a_message_of_it_is_kept(db, connection, saga):
    assert one(connection, "select mbus.saga_data(%s)", saga) == {"tour_id": "7"}
    assert one(connection, "select mbus.saga_data(%s)", saga + 1) is None
    run(db)
    for queue in TOUR.queues:
        connection.execute(f'delete from mbus."log${queue}"')
    assert one(connection, "select mbus.saga_data(%s)", saga) is None


def test_long_data_of_a_saga_are_left_out(connection):
    long = start_saga(connection, TOUR, {"tour_id": "7" * 30_000})
    found = one(connection, "select mbus.saga_data(%s)", long)
    assert isinstance(found, str)
    assert "left out" in found


def test_of_many_that_have_not_ended_the_oldest_and_the_newest_are_told(connection):
    sagas = [one(connection, "insert into mbus.saga (name) values ('s') returning id") for _ in range(9)]
    assert latest(connection, "id", most=4) == [(sagas[8],), (sagas[7],), (sagas[1],), (sagas[0],)]


def test_many_that_have_ended_are_not_read(connection, saga):
    connection.execute("""
        insert into mbus.saga (name, state) select 'old', 'complete' from generate_series(1, 5000);
        analyze mbus.saga
    """)
    with connection.transaction():
        assert len(latest(connection, "id")) == 100
        read = one(
            connection,
            "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables where relid = 'mbus.saga'::regclass",
        )
    assert read <= 250


def test_a_role_with_a_queue_of_a_saga_sees_the_saga_and_a_consumer_its_data(owner, role, connect_to):
    poster, consumer, stranger, maintainer = (
        role(name) for name in ("poster", "consumer", "stranger", "maintainer")
    )
    owner.execute("select mbus.create_queue('bungs', 2, true), mbus.create_queue('ends', 2, true)")
    description = (
        '{"name": "s", "bungs": "bungs", "end": "ends", "rolled_back": "ends", '
        '"steps": [{"name": "a", "queue": "q", "compensation": "r", "after": []}]}'
    )
    saga = one(owner, "select mbus.start_saga(%s, 'n=>1')", description)
    database = owner.info.dbname
    owner.execute(f"grant mbus_{database}_post_q to {poster.name}")
    owner.execute(f"grant mbus_{database}_consume_q_by_other to {consumer.name}")
    owner.execute(f"select mbus.grant_maintainer('{maintainer.name}')")
    seen = {
        who.name: (
            len(latest(session, "id")),
            one(session, "select mbus.saga_data(%s)", saga),
        )
        for who in (poster, consumer, stranger, maintainer)
        if (session := connect_to(who.conninfo))
    }
    assert seen == {
        poster.name: (1, None),
        consumer.name: (1, {"n": "1"}),
        stranger.name: (0, None),
        maintainer.name: (1, None),
    }
    for queue in ("bungs", "ends"):
        owner.execute("select mbus.drop_queue(%s)", [queue])


SMALL = (
    '{"name": "s", "bungs": "bungs", "end": "ends", "rolled_back": "ends", '
    '"steps": [{"name": "a", "queue": "q", "compensation": "r", "after": []}]}'
)


@pytest.fixture
def poster(owner, role, connect_to):
    """A role that may post to the queues of an open and of a completed saga. Many other sagas came later."""
    owner.execute("select mbus.create_queue('bungs', 2, true), mbus.create_queue('ends', 2, true)")
    for _ in range(2):
        owner.execute("select mbus.start_saga(%s, 'n=>1')", [SMALL])
    owner.execute("""
        update mbus.saga set state = 'complete' where id = 1;
        insert into mbus.saga (name, state) select 'other', 'complete' from generate_series(1, 5000);
        insert into mbus.saga (name) select 'other' from generate_series(1, 150);
        insert into mbus.saga_message (saga, iid, kind, step, "after")
        select s.id, 'ends.1' || s.id, 'step', 'a', '{}' from mbus.saga as s where s.name = 'other';
        analyze mbus.saga, mbus.saga_message;
    """)
    known = role("poster")
    owner.execute(f"grant mbus_{owner.info.dbname}_post_q to {known.name}")
    yield connect_to(known.conninfo)
    for queue in ("bungs", "ends"):
        owner.execute("select mbus.drop_queue(%s)", [queue])


def test_a_role_that_may_see_few_sagas_sees_them_among_many_others(poster):
    assert latest(poster, "id") == [(2,), (1,)]


def test_to_find_the_few_that_one_may_see_those_that_have_ended_are_not_read(poster):
    with poster.transaction():
        latest(poster, "id")
        read = one(
            poster,
            "select sum(seq_tup_read + idx_tup_fetch) from pg_stat_xact_user_tables "
            "where relid in ('mbus.saga'::regclass, 'mbus.saga_message'::regclass)",
        )
    assert read <= 1000


def test_a_consumer_sees_the_data_of_a_saga_until_it_has_received_its_message(owner, role, connect_to):
    owner.execute("select mbus.create_queue('bungs', 2, true), mbus.create_queue('ends', 2, true)")
    saga = one(owner, "select mbus.start_saga(%s, 'n=>1')", SMALL)
    consumer = role("consumer")
    owner.execute(f"grant mbus_{owner.info.dbname}_consume_q_by_other to {consumer.name}")
    session = connect_to(consumer.conninfo)
    for name in ("default", "other"):
        assert one(session, "select mbus.saga_data(%s)", saga) == {"n": "1"}
        consume(owner, name)
    assert one(session, "select mbus.saga_data(%s)", saga) is None
    assert one(owner, "select mbus.saga_data(%s)", saga) == {"n": "1"}
    for queue in ("bungs", "ends"):
        owner.execute("select mbus.drop_queue(%s)", [queue])


def test_the_steps_of_a_saga_are_refused_to_who_may_use_no_queue_of_it(owner, role, connect_to):
    number = one(owner, "insert into mbus.saga (name) values ('s') returning id")
    stranger = connect_to(role("stranger").conninfo)
    for look in (states, retries):
        with pytest.raises(Exception, match="Access denied"):
            look(stranger, number)
