"""Handlers of a group: at least once, in order, each at its own pace."""

from __future__ import annotations

import asyncio
import threading
import time

import psycopg
import pytest

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import ConsumerBusy, Stopped
from airflow_pgchange.events import Event, Handler, handler_run, publish, subscribe, topical
from airflow_pgchange.events import group as group_module
from airflow_pgchange.events.group import Group
from airflow_pgchange.events.handler_run import Handled
from tests.handling import (
    LATER,
    SECONDS,
    Seen,
    failing,
    group,
    held,
    hurry,
    in_thread,
    numbered,
    run_with_retries,
    subscribed,
    unread,
)
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def connection(connect):
    return subscribed(connect())


def test_every_handler_gets_every_event_in_order(db, connection):
    first, second = Seen(), Seen()
    publish(connection, numbered(0, 250))
    done = group(db, Handler("a", first), Handler("b", second), limit=100).run("empty")
    assert first.numbers == second.numbers == list(range(250))
    assert (done.batches, done.events, done.failed) == (3, 250, 0)
    assert unread(connection) == []


def test_handled_events_do_not_come_again(db, connection):
    seen = Seen()
    publish(connection, numbered(0, 10))
    for _ in range(2):
        group(db, Handler("a", seen)).run("empty")
    publish(connection, numbered(10, 20))
    group(db, Handler("a", seen)).run("empty")
    assert seen.numbers == list(range(20))


def test_a_delivery_says_everything_about_its_events(db, connection):
    seen = Seen()
    sid = subscribe(connection, "g", topical("v"))
    (made,) = publish(connection, Event("v", [1, 2], {"by": "me"}), returning=True)
    group(db, Handler("a", seen)).run("empty")
    (delivery,) = seen.deliveries
    assert delivery.events == (Event("v", [1, 2], {"by": "me"}, id=made, subscriptions=(sid,)),)
    assert (delivery.group, delivery.handler, delivery.attempt) == ("g", "a", 1)


def test_a_handler_of_some_subscriptions_gets_their_events_alone(db, connection):
    mine, all_of_them = Seen(), Seen()
    sid = subscribe(connection, "g", topical("v"))
    publish(connection, [*numbered(0, 3), *numbered(3, 5, "v"), *numbered(5, 6)])
    group(db, Handler("mine", mine, subscriptions=[sid]), Handler("all", all_of_them)).run("empty")
    assert mine.numbers == [3, 4]
    assert all_of_them.numbers == list(range(6))


def test_an_async_handler_is_awaited(db, connection):
    seen = []

    async def handle(delivery):
        await asyncio.sleep(0)
        seen.append(len(delivery.events))

    publish(connection, numbered(0, 5))
    group(db, Handler("a", handle)).run("empty")
    assert seen == [5]


def test_events_that_are_published_by_a_handler_are_handled_too(db, connect, connection):
    def answer(delivery):
        n = delivery.events[0].payload["n"]
        if n < 3:
            with psycopg.connect(db) as own:
                publish(own, Event("t", {"n": n + 1}))

    seen = Seen(answer)
    publish(connection, Event("t", {"n": 0}))
    group(db, Handler("a", seen)).run("empty")
    assert seen.numbers == [0, 1, 2, 3]


def test_a_run_for_some_time_handles_what_comes_meanwhile(db, connection):
    got = threading.Event()
    handlers = group(db, Handler("a", lambda delivery: got.set()))
    joined = in_thread(handlers.run, 3600.0)
    publish(connection, numbered(0, 1))
    assert got.wait(SECONDS)
    handlers.stop()
    assert joined().events == 1


def test_a_run_ends_once_nothing_has_come_for_so_long_and_not_while_it_is_at_work(db, connection):
    seen = Seen(lambda delivery: time.sleep(0.3))
    publish(connection, numbered(0, 2))
    began = time.monotonic()
    done = group(db, Handler("a", seen), limit=1).run(3600.0, idle_timeout=0.2)
    assert (done.events, seen.numbers) == (2, [0, 1])
    assert time.monotonic() - began < SECONDS


def test_a_run_until_nothing_is_left_waits_for_more_as_long_as_it_is_told(db, connection):
    seen = Seen()
    handlers = group(db, Handler("a", seen))
    joined = in_thread(handlers.run, "empty", 3600.0)
    publish(connection, numbered(0, 1))
    until(connection, "select last_read_event_id <> '' from pgmb.subscription_groups where id = 'g'")
    handlers.stop()
    assert (joined().events, seen.numbers) == (1, [0])


def test_a_run_ends_when_its_time_is_over_and_finishes_what_it_read(db, connection):
    seen = Seen()
    publish(connection, numbered(0, 50))
    done = group(db, Handler("a", seen), limit=10).run(0.05)
    assert seen.numbers == list(range(done.events))
    assert unread(connection) == list(range(done.events, 50))


def test_a_run_whose_time_is_over_sleeps_while_its_calls_go_on(db, connection, monkeypatch):
    monkeypatch.setattr(handler_run, "STAY_EVERY", 10.0 * SECONDS)
    asleep, collect = threading.Event(), handler_run.HandlerRun._collect

    def look(self, until):
        if until > time.monotonic() + 1:
            asleep.set()
        return collect(self, until)

    monkeypatch.setattr(handler_run.HandlerRun, "_collect", look)
    publish(connection, numbered(0, 1))
    assert group(db, Handler("a", lambda _: asleep.wait(SECONDS))).run(0.2).events == 1
    assert asleep.is_set()


def test_a_fast_handler_is_ahead_of_a_slow_one_by_so_many_batches_and_no_more(db, connection, monkeypatch):
    monkeypatch.setattr(handler_run, "STAY_EVERY", 0.01)
    proceed, turns = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(Group, "stay", lambda self: turns.release())
    slow, fast, reached = Seen(lambda delivery: proceed.wait(SECONDS)), Seen(), threading.Event()

    def quick(delivery):
        fast(delivery)
        if delivery.events[-1].payload["n"] == 39:
            reached.set()

    publish(connection, numbered(0, 100))
    handlers = group(db, Handler("slow", slow), Handler("fast", quick), limit=10, read_ahead=4)
    joined = in_thread(handlers.run, "empty")
    assert reached.wait(SECONDS)
    while turns.acquire(blocking=False):
        pass
    for _ in range(3):
        assert turns.acquire(timeout=SECONDS)
    assert fast.numbers == list(range(40))
    proceed.set()
    joined()
    assert slow.numbers == fast.numbers == list(range(100))


def test_the_stored_cursor_is_where_the_slowest_is(db, connection):
    gate, at_third = threading.Semaphore(0), threading.Event()

    def wait_from_third(delivery):
        if delivery.events[0].payload["n"] == 20:
            at_third.set()
            gate.acquire(timeout=SECONDS)

    slow, fast = Seen(wait_from_third), Seen()
    publish(connection, numbered(0, 50))
    handlers = group(db, Handler("slow", slow), Handler("fast", fast), limit=10)
    joined = in_thread(handlers.run, "empty")
    assert at_third.wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    while unread(connection) != list(range(20, 50)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gate.release()
    joined()
    assert unread(connection) == []


def test_an_unreliable_handler_does_not_delay_the_cursor(db, connection):
    proceed, started = threading.Event(), threading.Event()

    def wait(delivery):
        started.set()
        proceed.wait(SECONDS)

    loose, reliable = Seen(wait), Seen()
    publish(connection, numbered(0, 20))
    handlers = group(db, Handler("loose", loose, reliable=False), Handler("r", reliable), limit=10)
    joined = in_thread(handlers.run, "empty")
    assert started.wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    while unread(connection):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    proceed.set()
    joined()
    assert loose.numbers == list(range(20))


def test_events_of_one_key_come_in_order_and_others_in_parallel(db, connection):
    together = threading.Barrier(4)

    def meet(delivery):
        if delivery.events[0].payload["n"] < 40:
            together.wait(SECONDS)

    seen = Seen(meet)
    publish(connection, [Event("t", {"n": n, "k": n % 4}) for n in range(80)])
    split = Handler("split", seen, key=lambda event: event.payload["k"], threads=4)
    group(db, split, limit=40).run("empty")
    by_key: dict[int, list[int]] = {}
    for delivery in seen.deliveries:
        assert len({event.payload["k"] for event in delivery.events}) == 1
        by_key.setdefault(delivery.events[0].payload["k"], []).extend(e.payload["n"] for e in delivery.events)
    assert by_key == {k: list(range(k, 80, 4)) for k in range(4)}


def test_a_retry_and_later_events_of_its_key_are_not_in_work_at_once(db, connection):
    at_work, second, overlaps, fail = threading.Semaphore(1), threading.Event(), [], failing(1)

    def alone(delivery):
        fail(delivery)
        if not at_work.acquire(blocking=False):
            overlaps.append(delivery)
            second.set()
            return
        second.wait(0.1)
        at_work.release()

    seen = Seen(alone)
    handlers = group(db, Handler("split", seen, key=lambda event: 1, threads=4, retries=(LATER,)))
    publish(connection, numbered(0, 3))
    handlers.run("empty")
    assert hurry(connection) == 1
    publish(connection, numbered(3, 6))
    done = handlers.run("empty")
    assert done.batches == 1
    assert overlaps == []
    assert seen.numbers == list(range(6))


def test_the_key_of_a_delivery_is_the_same_in_every_attempt_and_differs_for_each_handler(db, connection):
    keys = []

    def note(delivery):
        keys.append((delivery.handler, delivery.attempt, delivery.key))
        if delivery.handler == "a" and delivery.attempt < 3:
            raise ValueError("again")

    publish(connection, numbered(0, 3))
    run_with_retries(group(db, Handler("a", note, retries=(LATER, LATER)), Handler("b", note)), connection)
    assert {attempt for handler, attempt, _ in keys if handler == "a"} == {1, 2, 3}
    assert len({key for handler, _, key in keys if handler == "a"}) == 1
    assert len({key for _, _, key in keys}) == 2


def test_a_group_has_one_reader(db, connection):
    started, proceed = threading.Event(), threading.Event()

    def wait(delivery):
        started.set()
        proceed.wait(SECONDS)

    publish(connection, numbered(0, 1))
    joined = in_thread(group(db, Handler("a", wait)).run, "empty")
    assert started.wait(SECONDS)
    with pytest.raises(ConsumerBusy):
        group(db, Handler("a", Seen())).run("empty")
    assert connection.execute("select * from pgmb.read_next_events('g')").fetchall() == []
    assert held(connection)
    waiting = in_thread(group(db, Handler("a", Seen()), busy_timeout=SECONDS).run, "empty")
    proceed.set()
    joined()
    assert waiting().events == 0


def test_a_run_that_is_stopped_while_it_waits_for_the_group_holds_no_group(db, connection):
    connection.execute("select pg_advisory_lock(pgmb.lock_key('g'))")
    handlers = group(db, Handler("a", Seen()), busy_timeout=None)
    joined = in_thread(handlers.run)
    handlers.stop()
    assert joined() == Handled()
    with pytest.raises(Stopped), group_module.held_group(db, "g", None, lambda: True):
        raise AssertionError("it is not held")
    assert held(connection)


def test_the_group_is_free_when_the_run_has_ended(db, connection):
    group(db, Handler("a", Seen())).run("empty")
    assert not held(connection)


def test_a_group_keeps_its_subscriptions_alive(db, connection, monkeypatch):
    monkeypatch.setattr(handler_run, "STAY_EVERY", 0.01)
    connection.execute(
        "update pgmb.subscriptions set expiry_interval = interval '10 minutes', "
        "last_active_at = now() - interval '9 minutes'"
    )
    group(db, Handler("a", Seen())).run(0.1)
    row = connection.execute("select last_active_at > now() - interval '1 minute' from pgmb.subscriptions")
    assert row.fetchone() == (True,)


def test_a_run_that_finds_nothing_keeps_the_groups_subscriptions_alive(db, connection):
    connection.execute(
        "update pgmb.subscriptions set expiry_interval = interval '10 minutes', "
        "last_active_at = now() - interval '9 minutes'"
    )
    assert group(db, Handler("a", Seen())).run("empty").events == 0
    row = connection.execute("select last_active_at > now() - interval '1 minute' from pgmb.subscriptions")
    assert row.fetchone() == (True,)


def test_a_consumers_rights_are_enough(db, connection, role):
    other = role("consumer")
    connection.execute("select pgmb.grant_consumer(%s::regrole)", [other.name])
    publish(connection, numbered(0, 3))
    ids = publish(connection, numbered(3, 4), returning=True)
    sid = connection.execute("select id from pgmb.subscriptions").fetchone()[0]
    payload = {"ids": ids, "retryNumber": 1, "handlerName": "a"}
    publish(connection, Event("pgmb-retry", payload, subscription_id=sid))
    bad = Handler("bad", failing(2), retries=(LATER,))
    run_with_retries(group(other.conninfo, Handler("a", Seen()), bad), connection)
    assert [letter.consumer for letter in dead_letters.letters(connection)] == ["events:g/bad"]


def test_a_run_until_nothing_is_left_is_not_ended_by_what_others_get(db, connection):
    connection.execute("update pgmb.config set value = '10' where id = 'poll_chunk_size'")
    subscribe(connection, "other", topical("x"))
    for topic in ["x"] * 30 + ["nobody's"] * 30:
        publish(connection, Event(topic))
    publish(connection, numbered(0, 1))
    seen = Seen()
    group(db, Handler("a", seen)).run("empty")
    assert seen.numbers == [0]
