"""Temporary queues and consumers, and triggers between queues."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.queues import consume, consumen, consumer, drain, fill, make, one, post, take, there
from tests.waiting import until, waits

pytestmark = pytest.mark.hstore


def gone(connection, name):
    """Wait until a session no longer holds the lock on its own name."""
    until(connection, f"select not mbus.lives('{name}')")


def test_a_temporary_queue_is_posted_to_and_consumed_from_like_any(q, connect):
    asking = connect()
    reply = one(asking, "select mbus.create_temporary_queue()")
    post(q, 1, reply)
    post(q, 2, reply, delay="1h")
    post(q, 3, reply)
    assert consume(asking, queue=reply) == "1"
    assert consume(asking, queue=reply) == "3"
    assert consume(asking, queue=reply) is None


def test_times_of_a_temporary_queue_count_in_the_time_zone_of_who_posts(q, connect):
    asking = connect()
    asking.execute("set time zone 'Asia/Tokyo'")
    reply = one(asking, "select mbus.create_temporary_queue()")
    q.execute("set time zone 'UTC'")
    post(q, 1, reply, delay="1h")
    post(q, 2, reply, expires="1h")
    asking.execute("select mbus.clear_tempq()")
    assert consume(asking, queue=reply) == "2"
    assert consume(asking, queue=reply) is None


def test_a_request_is_answered_on_a_temporary_queue(q, connect):
    asking = connect()
    reply = one(asking, "select mbus.create_temporary_queue()")
    asking.execute("select mbus.post_q('n=>7', properties => hstore('reply', %s))", [reply])
    row = q.execute("select data -> 'n', properties -> 'reply' from mbus.consume('q')").fetchone()
    q.execute("select mbus.post(%s, hstore('n', %s))", [row[1], row[0] + "!"])
    assert consume(asking, queue=reply) == "7!"


def test_consuming_from_a_temporary_queue_never_waits(q, connect):
    reply = one(q, "select mbus.create_temporary_queue()")
    post(q, 1, reply)
    holder = connect(autocommit=False)
    assert consume(holder, queue=reply) == "1"
    assert consume(q, queue=reply) is None
    holder.rollback()
    assert consume(q, queue=reply) == "1"


def test_a_message_of_a_temporary_queue_waits_for_those_that_it_names(q, connect):
    reply = one(q, "select mbus.create_temporary_queue()")
    first = post(q, 1)
    second = post(q, 2, reply, after=[first])
    post(q, 3, reply, after=[second])
    post(q, 4, reply)
    assert consume(q, queue=reply) == "4"
    assert consume(q, queue=reply) is None
    assert drain(q) == ["1"]
    holder = connect(autocommit=False)
    assert consume(holder, queue=reply) == "2"
    assert consume(q, queue=reply) is None
    holder.commit()
    assert consume(q, queue=reply) == "3"


def test_a_message_of_a_temporary_queue_that_expired_holds_up_nobody(q):
    reply = one(q, "select mbus.create_temporary_queue()")
    expired = post(q, 1, reply, expires="-1 second")
    post(q, 2, reply, after=[expired])

    assert consume(q, queue=reply) == "2"


def test_a_temporary_queue_ends_with_its_session(q, connect_to, db):
    session = connect_to(db)
    reply = one(session, "select mbus.create_temporary_queue()")
    post(q, 1, reply)
    q.execute("select mbus.clear_tempq()")
    assert one(q, "select count(*) from mbus.tempq") == 1
    session.close()
    gone(q, reply)
    for call in [lambda: post(q, 2, reply), lambda: consume(q, queue=reply)]:
        with pytest.raises(psycopg.Error, match="Unknown queue:temp"):
            call()
    q.execute("select mbus.clear_tempq()")
    assert one(q, "select count(*) from mbus.tempq") == 0


def test_a_temporary_consumer_receives_by_its_selector_and_ends_with_its_session(q, connect_to, db):
    fill(q, [1, 2])
    session = connect_to(db)
    name = one(session, "select mbus.create_temporary_consumer('q', $$t.data->'n' = '2'$$)")
    fill(q, [2, 3])
    assert drain(session, name) == ["2", "2"]
    assert drain(q) == ["1", "2", "2", "3"]
    q.execute("select mbus.clear_tempq()")
    assert consume(session, name) is None
    fill(q, [2])
    session.close()
    gone(q, f"q {name}")
    q.execute("select mbus.clear_tempq()")
    assert q.execute("select name from mbus.consumer").fetchall() == [("default",)]
    assert drain(q) == ["2"]
    assert there(q) == []


def test_a_consumer_is_made_while_others_look_into_its_queue(q, connect):
    fill(q, [1])
    first, maker, second = connect(autocommit=False), connect(), connect()
    assert there(first) == ["1"]
    done: list[object] = []
    calls = [
        (maker, lambda: one(maker, "select mbus.create_temporary_consumer('q') is not null")),
        (second, lambda: there(second)),
    ]
    threads = []
    for connection, call in calls:
        threads.append(threading.Thread(target=lambda call=call: done.append(call())))
        threads[-1].start()
        until(q, waits(connection, "relation"))
    first.commit()
    for thread in threads:
        thread.join()
    assert sorted(done, key=str) == [True, ["1"]]


def test_taking_a_message_and_making_a_consumer_do_not_wait_for_each_other(q, connect):
    iids = fill(q, [1, 2])
    q.execute("set lock_timeout = '5s'")
    taker, maker = connect(autocommit=False), connect(autocommit=False)
    maker.execute("set lock_timeout = '5s'")
    assert take(taker, iids[0]) == "1"
    maker.execute("select mbus.create_temporary_consumer('q')")
    assert one(q, "select (mbus.peek(%s)).iid", iids[1]) == iids[1]
    assert take(q, iids[1]) == "2"


def test_a_queue_is_dropped_while_others_look_into_it(q, connect):
    make(q, "r")
    first, dropper, second = connect(autocommit=False), connect(), connect()
    assert there(first, "r") == []
    failed: list[Exception] = []

    def look():
        try:
            there(second, "r")
        except psycopg.Error as error:
            failed.append(error)

    threads = []
    calls = [(dropper, lambda: dropper.execute("select mbus.drop_queue('r')")), (second, look)]
    for connection, call in calls:
        threads.append(threading.Thread(target=call))
        threads[-1].start()
        until(q, waits(connection, "relation"))
    first.commit()
    for thread in threads:
        thread.join()
    assert [type(error) for error in failed] == [psycopg.errors.UndefinedTable]
    assert one(q, "select array_agg(qname) from mbus.list()") == ["q"]


def test_a_queue_is_dropped_once_those_end_who_use_it(q, connect):
    make(q, "r")
    iid = fill(q, [1, 2], "r")[0]
    user, dropper = connect(autocommit=False), connect()
    assert one(user, "select mbus.is_msg_exists(%s)", iid)
    thread = threading.Thread(target=lambda: dropper.execute("select mbus.drop_queue('r')"))
    thread.start()
    until(q, waits(dropper, "relation"))
    assert one(user, "select (mbus.peek(%s)).iid", iid) == iid
    assert take(user, iid) == "1"
    assert consumen(user, 10, queue="r") == ["2"]
    user.commit()
    thread.join()
    assert one(q, "select array_agg(qname) from mbus.list()") == ["q"]


@pytest.mark.parametrize("drop", ["mbus.drop_queue('r')", "mbus.drop_consumer('default', 'r')"])
def test_who_waits_for_what_is_dropped_while_somebody_receives_from_it_comes(q, connect, drop):
    make(q, "r", parts=1)
    iids = fill(q, [1, 2], "r")
    post(q, 3, after=[iids[1]])
    assert drain(q) == []
    user, dropper = connect(autocommit=False), connect()
    assert consume(user, queue="r") == "1"
    thread = threading.Thread(target=lambda: dropper.execute(f"select {drop}"))
    thread.start()
    until(q, waits(dropper))
    user.commit()
    thread.join()
    assert drain(q) == ["3"]


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("mbus.drop_queue('r')", {}),
        ("mbus.create_consumer('x', 'r')", {"default": 12, "x": 12}),
    ],
)
def test_a_queue_that_is_made_anew_before_somebodys_turn_is_the_one_that_is_changed(q, connect, change, left):
    make(q, "r")
    maker, other = connect(autocommit=False), connect()
    maker.execute("select mbus.drop_queue('r')")
    thread = threading.Thread(target=lambda: other.execute(f"select {change}"))
    thread.start()
    until(q, waits(other))
    make(maker, "r", parts=8)
    fill(maker, range(12), "r")
    maker.commit()
    thread.join()
    names = one(q, "select array_agg(name) from mbus.consumer where qname = 'r'") or []
    assert {name: len(drain(q, name, queue="r", most=1)) for name in names} == left
    make(q, "r")


def test_a_trigger_copies_what_its_selector_matches(q):
    make(q, "r", "s")
    q.execute("select mbus.create_trigger('q', 'r', $$t.data->'n' = '1'$$)")
    q.execute("select mbus.create_trigger('q', 's')")
    q.execute("select mbus.post_q('n=>1', headers => 'h=>1', properties => 'p=>1')")
    fill(q, [2])
    query = (
        "select data -> 'n', headers -> array['h', 'destination'], properties -> 'p' from mbus.consume('r')"
    )
    assert q.execute(query).fetchall() == [("1", ["1", "r"], "1")]
    assert drain(q, queue="r") == []
    assert drain(q, queue="s") == ["1", "2"]
    q.execute("select mbus.drop_trigger('q', 's')")
    assert drain(q) == ["1", "2"]
    fill(q, [1])
    assert drain(q, queue="s") == []
    assert drain(q, queue="r") == ["1"]


def test_a_message_that_is_put_back_is_not_copied_again(q):
    make(q, "r")
    q.execute("select mbus.create_trigger('q', 'r')")
    post(q, 1)
    with q.transaction():
        (iid,) = q.execute("select iid from mbus.consume('q')").fetchone()
        q.execute("select mbus.try_again(%s, '0')", [iid])
    assert drain(q) == ["1"]
    assert drain(q, queue="r") == ["1"]


def test_a_loop_of_triggers_is_refused(q):
    make(q, "r", "s")
    q.execute("select mbus.create_trigger('q', 'r')")
    q.execute("select mbus.create_trigger('r', 's')")
    for source, target in [("s", "q"), ("s", "s"), ("r", "q")]:
        with pytest.raises(psycopg.Error, match="Loop detected"):
            q.execute("select mbus.create_trigger(%s, %s)", [source, target])
    post(q, 1)
    assert drain(q, queue="s") == ["1"]


def test_a_trigger_whose_selector_fails_lets_the_post_through_and_reports(q):
    make(q, "r")
    q.execute("select mbus.create_trigger('q', 'r', $$(t.data->'n')::integer > 1$$)")
    fill(q, [1, "x", 2])
    assert drain(q) == ["1", "x", "2"]
    assert drain(q, queue="r") == ["2"]
    assert "not copied to queue r" in one(q, "select message from mbus.fault where message_id = 2")


def test_dropping_the_queue_that_a_trigger_leads_to_leaves_the_other_working(q):
    make(q, "r")
    q.execute("select mbus.create_trigger('q', 'r')")
    q.execute("select mbus.drop_queue('r')")
    post(q, 1)
    assert drain(q) == ["1"]


def test_dropping_the_queue_that_a_trigger_leads_to_waits_for_who_posts_and_not_the_other_way_round(
    q, connect
):
    make(q, "r")
    q.execute("select mbus.create_trigger('q', 'r', $$t.data->'n' = '2'$$)")
    poster, dropper = connect(autocommit=False), connect()
    post(poster, 1)
    thread = threading.Thread(target=lambda: dropper.execute("select mbus.drop_queue('r')"))
    thread.start()
    until(q, waits(dropper, "relation"))
    poster.execute("set lock_timeout = '5s'")
    post(poster, 2)
    poster.commit()
    thread.join()
    assert drain(q) == ["1", "2"]
    assert one(q, "select array_agg(qname) from mbus.list()") == ["q"]


def test_dropping_the_queue_that_a_trigger_copies_from_leaves_the_other_working(q):
    make(q, "r")
    q.execute("select mbus.create_trigger('q', 'r')")
    post(q, 1)
    q.execute("select mbus.drop_queue('q')")
    assert drain(q, queue="r") == ["1"]


def test_a_selector_that_fails_on_a_message_keeps_it_for_its_consumer_and_stops_nobody(q):
    consumer(q, "number", "(t.data->'n')::integer > 1")
    fill(q, [1, "x", 2, 3])
    assert drain(q, "number") == ["2", "3"]
    assert drain(q) == ["1", "x", "2", "3"]
    assert there(q) == ["x"]
    row = q.execute("select qname, consumer, message_id from mbus.fault").fetchall()
    assert row == [("q", "number", 2)]
    assert one(q, "select mbus.retry_faults('q', 'number')") == 0
