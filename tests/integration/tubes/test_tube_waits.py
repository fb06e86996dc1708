"""Waiting operations stop at once on request. The pause of a backfill waits for nobody."""

from __future__ import annotations

import threading
from contextlib import closing
from select import select

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange import tubes
from airflow_pgchange.errors import InvalidArgument, PgChangeError, Stopped
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.feeds.connections import connect as connect_ours
from airflow_pgchange.feeds.connections import keep_open
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.tubes.backfills import LOOK_AGAIN
from tests.silence import ended, through
from tests.tubes import begin, chunk, one, touched
from tests.waiting import sleeps, until, waits

FOR_EVER = 3600.0


def in_thread(function):
    """Run a function in a thread, and return its exception."""
    raised = []

    def run():
        try:
            function()
        except (PgChangeError, psycopg.Error) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_a_backfill_that_rests_between_chunks_stops_at_once(item, connect):
    stop, rests = Stop(), threading.Event()
    thread, raised = in_thread(
        lambda: tubes.backfill(
            connect(),
            "q",
            "public.item",
            "day",
            pause=FOR_EVER,
            chunk_size=100,
            stop=stop,
            on_progress=lambda _: rests.set(),
        )
    )
    assert rests.wait(60)
    stop.ask()
    thread.join(60)
    assert [type(error) for error in raised] == [Stopped]
    assert len(touched(item)) == 100


@pytest.mark.parametrize("asked", [True, False])
def test_a_backfill_whose_chunk_is_cancelled_was_stopped_only_where_somebody_asked_for_that(
    item, connect, asked
):
    stop, filling, writer = Stop(), connect(), connect(autocommit=False)
    writer.execute("lock table item in access exclusive mode")
    thread, raised = in_thread(lambda: tubes.backfill(filling, "q", "public.item", stop=stop))
    until(connect(), waits(filling))
    if asked:
        stop.ask()
    filling.cancel()
    thread.join(60)
    writer.rollback()
    (error,) = raised
    assert isinstance(error, Stopped) == asked


def test_pausing_a_backfill_in_its_last_chunk_reports_that_it_is_done(item, connect):
    number, worker = begin(item), connect(autocommit=False)
    while not chunk(worker, number)[3]:
        worker.commit()
    person = connect()
    thread, raised = in_thread(lambda: person.execute("select tube.backfill_pause(%s)", [number]))
    until(connect(), waits(person))
    worker.commit()
    thread.join(60)
    [error] = raised
    assert str(error).startswith(f"backfill {number} is done, ")
    assert one(item, "select state from tube.backfills()") == "done"


def test_it_rests_between_two_chunks_and_looks_again_at_one_that_is_paused(item, monkeypatch):
    rests, number = [], begin(item, chunk_size=400)

    class Resting(Stop):
        def rest(self, seconds):
            rests.append(seconds)
            if len(rests) == 1:
                item.execute("select tube.backfill_pause(%s)", [number])
            if len(rests) == 3:
                item.execute("select tube.backfill_resume(%s)", [number])

    tubes.backfill(item, "q", "public.item", "day", pause=5.0, stop=Resting())
    assert rests == [5.0, LOOK_AGAIN, LOOK_AGAIN, 5.0, 5.0]


def test_a_backfill_that_somebody_cancels_is_stopped(item):
    def cancel(progress):
        item.execute("select tube.backfill_cancel(%s)", [progress.id])

    with pytest.raises(Stopped, match="was cancelled"):
        tubes.backfill(item, "q", "public.item", "day", chunk_size=100, on_progress=cancel)
    assert len(touched(item)) == 100


def test_a_backfill_that_is_paused_is_not_resumed_by_who_begins_it_again(item):
    number = begin(item, chunk_size=100)
    item.execute("select tube.backfill_pause(%s)", [number])
    assert begin(item, chunk_size=7) == number
    assert chunk(item, number)[4] == "paused"
    assert one(item, "select chunk_size from tube.backfill") == 100
    assert one(item, "select message from tube.backfill").startswith("paused by")


@pytest.mark.parametrize("pause", [-1.0, float("nan"), float("inf")])
def test_a_pause_that_makes_no_sense_is_refused_before_any_work(item, pause):
    with pytest.raises(InvalidArgument, match="pause"):
        tubes.backfill(item, "q", "public.item", "day", pause=pause)
    assert one(item, "select count(*) from tube.backfill") == 0


@pytest.fixture
def waiting(item, connect):
    """A backfill whose first chunk waits for a writer."""
    writer = connect(autocommit=False)
    writer.execute("update item set kind = 'b' where id = 1")
    number = begin(item)
    thread, raised = in_thread(lambda: chunk(connect(), number))
    until(item, sleeps("backfill_chunk"))
    yield number
    writer.rollback()
    thread.join(60)
    assert raised == []


@pytest.mark.parametrize(("call", "state"), [("pause", "paused"), ("cancel", "cancelled")])
def test_pausing_a_backfill_that_waits_for_writers_does_not_wait(item, waiting, call, state):
    item.execute("set lock_timeout = '5s'")
    item.execute(f"select tube.backfill_{call}(%s)", [waiting])
    assert one(item, "select state from tube.backfill") == state


def test_a_backfill_paused_while_it_waits_touches_nothing(item, connect):
    writer = connect(autocommit=False)
    writer.execute("update item set kind = 'b' where id = 1")
    number = begin(item)
    got = []
    thread, raised = in_thread(lambda: got.append(chunk(connect(), number)))
    until(item, sleeps("backfill_chunk"))
    item.execute("select tube.backfill_pause(%s)", [number])
    writer.rollback()
    thread.join(60)
    assert raised == []
    assert [row[4] for row in got] == ["paused"]
    assert touched(item) == []


def hasty(db):
    """Return a connection string whose sessions end after three idle seconds, which leaves time for their first
    statements."""
    return make_conninfo(db, options="-c idle_session_timeout=3s")


def idle(db):
    """Wait until the server has ended an idle session."""
    with closing(connect_ours(hasty(db))) as victim:
        select([victim.fileno()], [], [])


def test_a_backfill_that_rests_keeps_its_session(db, item):
    rests = []

    class Resting(Stop):
        def rest(self, seconds):
            if not rests:
                idle(db)
            rests.append(seconds)

    with connect_ours(hasty(db)) as connection:
        tubes.backfill(connection, "q", "public.item", "day", pause=1.0, chunk_size=500, stop=Resting())
    assert rests[0] == 1.0
    assert len(touched(item)) == 1000


def test_a_consumer_whose_work_takes_its_time_keeps_its_sessions(db, item):
    item.execute("update item set kind = 'b' where id < 5")
    with ConsumerTransaction(TubeFeed("q"), hasty(db)) as consumer:
        assert consumer.claim(10) is not None
        idle(db)
        assert len(list(consumer.changes())) == 4
        consumer.ack()
    assert touched(item) == []


def test_behind_a_pooler_nothing_is_set_for_others(pgbouncer):
    with connect_ours(pgbouncer) as connection:
        connection.execute("set idle_session_timeout = '1h'")
        keep_open(connection)
        assert one(connection, "show idle_session_timeout") == "1h"


def test_a_backfill_of_a_server_that_falls_silent_ends_and_leaves_no_lock(item, db, proxy, connect_to):
    """Test this also with a connection that this package has not opened."""
    connection = connect_to(through(proxy, db))

    def work():
        tubes.backfill(
            connection,
            "q",
            "public.item",
            chunk_size=100,
            on_progress=lambda _: proxy.fall_silent(serve_new=True),
        )

    assert isinstance(ended(work), PgChangeError)
    until(item, "select not exists (select from pg_locks where locktype = 'advisory')")
