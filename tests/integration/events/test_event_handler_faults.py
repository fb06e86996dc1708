"""Handlers that fail, hang or are killed, and locks of groups that are lost: no event is lost, and no lock is held for
ever."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import psycopg
import pytest

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import ConnectionLost, HandlerFailed, InvalidArgument, UnknownConsumer
from airflow_pgchange.events import (
    Event,
    EventHandlers,
    Handled,
    Handler,
    handler_run,
    handler_threads,
    publish,
)
from airflow_pgchange.events.group import Group
from tests.handling import (
    LATER,
    SECONDS,
    Seen,
    failing,
    group,
    hurry,
    in_thread,
    numbered,
    subscribed,
    unread,
)
from tests.waiting import locks

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def connection(connect):
    return subscribed(connect())


def test_without_retries_a_failure_ends_the_run_and_nothing_passes_it(db, connection):
    before, after = Seen(), Seen(failing(1))
    publish(connection, numbered(0, 20))
    first = group(db, Handler("strict", after, retries=None), limit=10)
    with pytest.raises(HandlerFailed, match="handler strict failed on 10 events"):
        first.run("empty")
    assert unread(connection) == list(range(20))
    group(db, Handler("strict", after, retries=None), Handler("b", before), limit=10).run("empty")
    assert after.numbers == list(range(20))
    assert dead_letters.letters(connection) == []


def test_every_failed_call_of_a_run_is_reported(db, connection, caplog, monkeypatch):
    failed, collect = threading.Barrier(3), handler_run.HandlerRun._collect

    def fail(delivery):
        failed.wait(SECONDS)
        time.sleep(0.05 * (delivery.handler == "other"))
        raise ZeroDivisionError

    def collect_both(run, until):
        if failed.n_waiting:
            failed.wait(SECONDS)
            time.sleep(0.3)
        return collect(run, until)

    monkeypatch.setattr(handler_run.HandlerRun, "_collect", collect_both)
    publish(connection, numbered(0, 5))
    strict = group(db, Handler("strict", fail, retries=None), Handler("other", fail))
    with pytest.raises(HandlerFailed, match="handler strict failed"):
        strict.run("empty")
    assert "handler strict failed" in caplog.text
    assert "handler other failed" in caplog.text


def test_a_call_that_takes_too_long_is_left_alone_and_tried_again(db, connection):
    released, noted, cancelled = threading.Event(), threading.Event(), []

    def slow(delivery):
        if delivery.attempt == 1:
            released.wait(SECONDS)
            cancelled.append(delivery.cancelled.is_set())
            noted.set()

    seen = Seen(slow)
    publish(connection, numbered(0, 3))
    group(db, Handler("slow", seen, timeout=0.05, retries=(LATER,))).run("empty")
    assert hurry(connection) == 1
    group(db, Handler("slow", seen, retries=())).run("empty")
    assert seen.attempts == [2]
    released.set()
    assert noted.wait(SECONDS)
    assert cancelled == [True]


def test_an_async_call_that_takes_too_long_is_ended(db, connection):
    ended = threading.Event()

    async def slow(delivery):
        try:
            await asyncio.sleep(10 * SECONDS)
        finally:
            ended.set()

    publish(connection, numbered(0, 3))
    done = group(db, Handler("slow", slow, timeout=0.05, retries=())).run("empty")
    assert ended.wait(SECONDS)
    assert done.given_up == 1
    assert "TimeoutError" in dead_letters.letters(connection)[0].error


def test_a_handler_whose_calls_never_end_ends_the_run(db, connection, monkeypatch):
    monkeypatch.setattr(handler_threads, "MOST_STUCK", 2)
    released = threading.Event()
    publish(connection, numbered(0, 10))
    handlers = group(
        db, Handler("stuck", lambda delivery: released.wait(SECONDS), timeout=0.02, retries=()), limit=1
    )
    with pytest.raises(HandlerFailed, match="3 calls still run after their timeout"):
        handlers.run("empty")
    released.set()


def test_a_run_that_ends_for_calls_that_never_do_waits_for_the_others(db, connection, monkeypatch):
    monkeypatch.setattr(handler_threads, "MOST_STUCK", 0)
    monkeypatch.setattr(handler_run, "STAY_EVERY", 0.05)
    released, began, looked, order = threading.Event(), threading.Event(), threading.Event(), []
    overdue = handler_threads.HandlerThreads.overdue

    def look(self):
        if self._closed and self._handler.name == "slow":
            looked.set()
        # Calls that have not begun when the run ends are not made.
        return overdue(self) if began.is_set() else []

    def slow(_):
        began.set()
        looked.wait(SECONDS)
        order.append("call")

    monkeypatch.setattr(handler_threads.HandlerThreads, "overdue", look)
    publish(connection, numbered(0, 1))
    stuck = Handler("stuck", lambda _: released.wait(SECONDS), timeout=0.02, retries=())
    with pytest.raises(HandlerFailed, match="1 calls still run"):
        group(db, stuck, Handler("slow", slow, timeout=SECONDS)).run("empty")
    order.append("run")
    released.set()
    assert order == ["call", "run"]


def test_a_failure_of_one_that_is_not_reliable_is_only_logged(db, connection, caplog):
    publish(connection, numbered(0, 5))
    done = group(db, Handler("loose", failing(1), reliable=False)).run("empty")
    assert (done.failed, done.retried, done.given_up) == (1, 0, 0)
    assert "handler loose failed" in caplog.text
    assert unread(connection) == []
    assert connection.execute("select count(*) from pgmb.events where topic = 'pgmb-retry'").fetchone() == (
        0,
    )


def test_events_of_an_unreliable_handler_count_as_read_before_its_call(db, connection, monkeypatch):
    order, keep, submit = [], Group.keep, handler_threads.HandlerThreads.submit
    monkeypatch.setattr(Group, "keep", lambda self, *what: (order.append("noted"), keep(self, *what))[1])
    monkeypatch.setattr(
        handler_threads.HandlerThreads,
        "submit",
        lambda self, call: (order.append("called"), submit(self, call)),
    )
    publish(connection, numbered(0, 5))
    group(db, Handler("loose", Seen(), reliable=False)).run("empty")
    assert order == ["noted", "called"]


def test_a_poisonous_key_takes_no_other_key_with_it(db, connection):
    def poison(delivery):
        if delivery.events[0].payload["k"] == 2:
            raise ValueError("poison")

    seen = Seen(poison)
    publish(connection, [Event("t", {"n": n, "k": n % 4}) for n in range(40)])
    group(db, Handler("split", seen, key=lambda event: event.payload["k"], retries=())).run("empty")
    assert sorted(seen.numbers) == [n for n in range(40) if n % 4 != 2]
    (letter,) = dead_letters.letters(connection)
    assert letter.changes == 10


def test_a_letter_of_a_handler_whose_subscription_goes_in_that_very_moment_stays(db, connection):
    publish(connection, numbered(0, 5))
    group(db, Handler("a", Seen(failing(1)), retries=())).run("empty")
    (letter,) = dead_letters.letters(connection)
    connection.execute("delete from pgmb.subscriptions")
    # The function that pgchange.redrive() calls after it has checked that the letter can be sent.
    with pytest.raises(psycopg.Error, match="no event can be sent to group"):
        connection.execute("select pgmb.redrive(%s)", [letter.id])
    assert [one.id for one in dead_letters.letters(connection)] == [letter.id]


def test_a_stop_finishes_what_runs_and_leaves_the_rest(db, connection, monkeypatch):
    started, proceed, stopping = threading.Event(), threading.Event(), threading.Event()
    close = handler_threads.HandlerThreads.close
    monkeypatch.setattr(handler_threads.HandlerThreads, "close", lambda self: (close(self), stopping.set()))

    def wait(delivery):
        started.set()
        proceed.wait(SECONDS)

    seen = Seen(wait)
    publish(connection, numbered(0, 100))
    handlers = group(db, Handler("a", seen), limit=10)
    joined = in_thread(handlers.run)
    assert started.wait(SECONDS)
    handlers.stop()
    assert stopping.wait(SECONDS)
    proceed.set()
    joined()
    assert seen.numbers == list(range(10))
    assert unread(connection) == list(range(10, 100))


def test_a_stop_ends_well_though_the_last_call_ends_while_it_is_waited_for(db, connection, monkeypatch):
    started, proceed = threading.Event(), threading.Event()
    next_deadline = handler_threads.HandlerThreads.next_deadline

    def as_it_ends(self):
        deadline = next_deadline(self)
        if deadline is not None and self._closed:
            proceed.set()
            while next_deadline(self) is not None:
                time.sleep(0.001)
        return deadline

    def wait(delivery):
        started.set()
        proceed.wait(SECONDS)

    monkeypatch.setattr(handler_threads.HandlerThreads, "next_deadline", as_it_ends)
    publish(connection, numbered(0, 2))
    handlers = group(db, Handler("a", wait), limit=1)
    joined = in_thread(handlers.run)
    assert started.wait(SECONDS)
    handlers.stop()
    assert isinstance(joined(), Handled)
    assert unread(connection) == [1]


def test_a_call_that_outlives_a_run_that_was_interrupted_is_nothing_to_the_next(db, connection, monkeypatch):
    class Interrupted(BaseException):
        pass

    def interrupt(self, *_):
        monkeypatch.undo()
        raise Interrupted

    def again(self, *_):
        monkeypatch.setattr(handler_run.HandlerRun, "_finish_what_runs", interrupt)
        raise Interrupted

    def wait(delivery):
        calls.append(delivery)
        if delivery is calls[0]:
            monkeypatch.setattr(handler_run.HandlerRun, "_collect", again)
            began.set()
            released.wait(SECONDS)
        else:
            repeated.set()
            proceed.wait(SECONDS)

    calls = []
    began, released, repeated, proceed = (threading.Event() for _ in range(4))
    publish(connection, numbered(0, 1))
    handlers = group(db, Handler("a", wait))
    with pytest.raises(Interrupted):
        handlers.run()
    assert began.wait(SECONDS)
    joined = in_thread(handlers.run, "empty")
    assert repeated.wait(SECONDS)
    released.set()
    time.sleep(0.5)
    assert unread(connection) == [0]
    proceed.set()
    assert joined().events == 1
    assert unread(connection) == []


@pytest.fixture
def pids(connection):
    """Return the backends that hold the lock of a group."""

    def find():
        own = connection.info.backend_pid
        return [lock.pid for lock in locks(connection) if lock.kind == "advisory" and lock.pid != own]

    return find


def test_a_lost_connection_is_named_and_nothing_is_lost(db, connection, pids):
    killed = []

    def kill(delivery):
        if not killed and delivery.events[0].payload["n"] == 20:
            killed.extend(pids())
            connection.execute("select pg_terminate_backend(%s, 10000)", killed)

    publish(connection, numbered(0, 100))
    seen = Seen(kill)
    with pytest.raises(ConnectionLost, match="come again"):
        group(db, Handler("a", seen), limit=10, read_ahead=1).run("empty")
    assert len(killed) == 1
    handled = seen.numbers
    group(db, Handler("a", seen), limit=10).run("empty")
    assert sorted(set(seen.numbers)) == list(range(100))
    assert set(range(20)).isdisjoint(seen.numbers[len(handled) :])


def test_a_run_that_loses_its_group_gets_an_error_while_its_calls_run(db, connection, pids, monkeypatch):
    monkeypatch.setattr(handler_run, "STAY_EVERY", 0.02)
    told = []

    def wait(delivery):
        (pid,) = pids()
        connection.execute("select pg_terminate_backend(%s, 10000)", [pid])
        told.append(delivery.cancelled.wait(SECONDS))

    publish(connection, numbered(0, 1))
    with pytest.raises(ConnectionLost):
        group(db, Handler("a", wait), read_ahead=1).run("empty")
    assert told == [True]


PROGRAM = """
import sys, time
import psycopg
from airflow_pgchange.events import EventHandlers, Handler

def handle(delivery):
    with psycopg.connect(sys.argv[1]) as own:
        for event in delivery.events:
            own.execute("insert into handled values (%s)", [event.payload["n"]])
    time.sleep(0.02 if delivery.events[0].payload["n"] < STOP else 3600)

EventHandlers("g", [Handler("a", handle)], sys.argv[1], limit=10).run("empty")
"""


def test_a_killed_process_loses_nothing(db, connection):
    connection.execute("create table handled (n int)")
    publish(connection, numbered(0, 300))
    process = subprocess.Popen([sys.executable, "-c", "STOP = 200" + PROGRAM, db])
    while connection.execute("select count(*) from handled").fetchone()[0] < 50:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = connection.execute("select count(distinct n) from handled").fetchone()[0]
    assert 50 <= before < 300
    again = "STOP = 300" + PROGRAM.replace("=10)", "=10, busy_timeout=30)")
    subprocess.run([sys.executable, "-c", again, db], check=True)
    assert connection.execute("select count(distinct n) from handled").fetchone() == (300,)


def test_an_unknown_group_is_refused_by_name_and_not_held(db, connection):
    with pytest.raises(UnknownConsumer, match="nobody"):
        EventHandlers("nobody", [Handler("a", Seen())], db).run("empty")


@pytest.mark.parametrize(
    "given",
    [
        {"name": ""},
        {"run": None},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"retries": (-1,)},
        {"retries": (60, 1e13)},
        {"retries": (float("nan"),)},
        {"threads": 0},
        {"subscriptions": "su1f3870be274f6c49b3e31a"},
    ],
)
def test_an_invalid_handler_is_refused(given):
    with pytest.raises(InvalidArgument):
        Handler(**{"name": "a", "run": print, **given})


def test_two_handlers_of_one_name_are_refused(db):
    with pytest.raises(InvalidArgument, match="a name of its own"):
        group(db, Handler("a", print), Handler("a", print))
