"""In a deadlock with writers of a table, PostgreSQL may cancel a backfill. The backfill then continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import errors, sql

from airflow_pgchange import tubes
from airflow_pgchange.feeds.connections import connect as connect_ours
from airflow_pgchange.feeds.retries import DEADLOCK_TRIES, past_deadlocks
from tests.tubes import begin, chunk, touched
from tests.waiting import until, waits

DEADLOCK = "select deadlocks > 0 from pg_stat_database where datname = current_database()"


@contextmanager
def deadlock(item, connect, gate) -> Iterator[None]:
    """Let PostgreSQL end a backfill in the block because of a deadlock.

    The backfill waits at a gate until another session waits for the backfill. Then the backfill waits for that session,
    and PostgreSQL cancels the backfill. The other session then goes on, and ends.
    """
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
    # The server reports the error of the cancelled session when that session is closed.
    until(item, DEADLOCK)


def test_a_backfill_that_was_ended_for_a_deadlock_goes_on(item, connect, db):
    chunk(item, begin(item))
    with deadlock(item, connect, "select from tube.backfill for update"), connect_ours(db) as victim:
        tubes.backfill(victim, "q", "public.item", "day", chunk_size=100)
    assert touched(item) == list(range(1, 1001))


def test_a_backfill_in_deadlocks_lets_other_sessions_go_first_and_gives_up_in_the_end(monkeypatch):
    tries, rests = [], []
    monkeypatch.setattr(time, "sleep", rests.append)

    def work():
        tries.append(None)
        raise errors.DeadlockDetected

    with pytest.raises(errors.DeadlockDetected):
        past_deadlocks(work)
    assert len(tries) == DEADLOCK_TRIES
    assert rests == pytest.approx([0.1 * number for number in range(1, DEADLOCK_TRIES)])
