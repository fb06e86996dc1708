"""Where writers of a table are in a deadlock, PostgreSQL may end a backfill of it, which goes on all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import errors, sql

from airflow_pgchange import tubes
from airflow_pgchange.feeds.connect import connect as connect_ours
from airflow_pgchange.feeds.retrying import DEADLOCK_TRIES, past_deadlocks
from tests.tubes import begin, chunk, make_items, touched
from tests.waiting import until, waits

DEADLOCK = "select deadlocks > 0 from pg_stat_database where datname = current_database()"


@pytest.fixture
def item(connect):
    connection = connect()
    make_items(connection)
    return connection


@contextmanager
def deadlock(item, connect, gate) -> Iterator[None]:
    """A block whose backfill waits at a gate until another session waits for it, and then for that one, which is a
    deadlock: the backfill is ended. The other one goes on, and ends in its turn."""
    opener, other = connect(autocommit=False), connect(autocommit=False)
    other.execute("set deadlock_timeout = '1h'")
    opener.execute(gate)
    other.execute("lock table item")
    item.execute(
        sql.SQL("alter database {} set deadlock_timeout = '10ms'").format(sql.Identifier(item.info.dbname))
    )

    def open_gate():
        until(item, waits(other))
        opener.rollback()

    def be_in_the_way():
        until(item, waits(behind=opener))
        other.execute("select pg_advisory_xact_lock(tube.backfill_key('item', 0))")
        other.rollback()

    threads = [threading.Thread(target=each) for each in (open_gate, be_in_the_way)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
    # The session that was ended says so when it is closed.
    until(item, DEADLOCK)


def by_chunks(connection):
    tubes.backfill(connection, "q", "public.item", "day", chunk_size=100)


def by_steps(connection):
    tubes.backfill_in_steps(connection, "q", "public.item", "day")


@pytest.mark.parametrize(
    ("backfill", "gate"), [(by_chunks, "select from tube.backfill for update"), (by_steps, "lock table q")]
)
def test_a_backfill_that_was_ended_for_a_deadlock_goes_on(item, connect, db, backfill, gate):
    if backfill is by_chunks:
        chunk(item, begin(item))
    with deadlock(item, connect, gate), connect_ours(db) as victim:
        backfill(victim)
    assert touched(item) == list(range(1, 1001))


def test_what_meets_a_deadlock_each_time_is_given_up():
    tries = []

    def work():
        tries.append(None)
        raise errors.DeadlockDetected

    with pytest.raises(errors.DeadlockDetected):
        past_deadlocks(work)
    assert len(tries) == DEADLOCK_TRIES
