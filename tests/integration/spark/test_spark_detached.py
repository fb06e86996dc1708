"""A Spark application that processes a detached batch by the text of its handle, and an ack in another process."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import psycopg
import pytest

from airflow_pgchange import detached
from airflow_pgchange.admin import manual_operations
from airflow_pgchange.detached import Handle
from airflow_pgchange.errors import BatchNotFinished, InvalidArgument, Leased, StaleClaim
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.spark import batch_job
from tests.ledger import Connect
from tests.planes import COUNTS, count_seats, make_planes
from tests.readme import Guide, track_payments
from tests.spark_session import spark_session
from tests.waiting import until

Connection = psycopg.Connection[Any]

OTHERS = (
    "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
)


@pytest.fixture
def connection(connect: Connect) -> Connection:
    spark_session()
    return connect()


def claimed(feed: CommitFeed, db: str, lease: float = 600) -> Handle:
    handle = detached.claim(feed, db, lease=lease, owner="the job")
    assert handle is not None
    return handle


def seats(connection: Connection) -> list[Any]:
    return connection.execute("select sum(n), sum(total) from seats").fetchall()


@pytest.fixture
def feed(connection: Connection) -> CommitFeed:
    connection.execute(COUNTS)
    return make_planes(connection)


def test_an_application_anywhere_processes_a_batch_by_its_handle_and_an_ack_merges_its_results(
    feed: CommitFeed, connection: Connection, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes seconds if this test starts the worker's Spark session."""
    monkeypatch.setenv("PGCHANGE_RESULTS", db)
    handle = claimed(feed, db)
    manual_operations.end_leases(connection, feed)
    with batch_job(str(handle)) as job:
        with pytest.raises(Leased):
            claimed(feed, db)
        count_seats(job)
        # Nothing is held while the application works: no connection, and so no transaction and no lock.
        until(connection, f"select ({OTHERS}) = 0")
    assert seats(connection) == [(None, None)]
    assert detached.ack(handle, db, staged=True)
    assert not detached.ack(handle, db, staged=True)
    assert seats(connection) == [(100, 5050)]


def test_results_of_a_late_application_are_not_merged(
    feed: CommitFeed, connection: Connection, db: str
) -> None:
    """Takes seconds if this test starts the worker's Spark session."""
    late = claimed(feed, db)
    with pytest.raises(StaleClaim), batch_job(late, results=db) as job:
        count_seats(job)
        manual_operations.end_leases(connection, feed)
        later = claimed(feed, db)
    with pytest.raises(StaleClaim):
        detached.ack(late, db, staged=True)
    with pytest.raises(BatchNotFinished, match="no application has staged results for attempt 2"):
        detached.ack(later, db, staged=True)
    with pytest.raises(StaleClaim), batch_job(late, results=db):
        raise AssertionError("the block of an attempt that is over does not run")
    assert seats(connection) == [(None, None)]


@pytest.mark.parametrize(
    ("error", "failures", "outages"), [(ValueError("bad"), 1, 0), (OSError("away"), 0, 1)]
)
def test_the_error_of_an_application_is_stored_with_its_attempt_and_a_release_keeps_it(
    error: Exception, failures: int, outages: int, feed: CommitFeed, connection: Connection, db: str
) -> None:
    """Takes seconds if this test starts the worker's Spark session."""
    handle = claimed(feed, db)
    with pytest.raises(type(error)), batch_job(handle, results=db) as job:
        count_seats(job)
        raise error
    detached.release(handle, db, error="a task failed")
    assert connection.execute("select error, failures, outages from pgchange.claim").fetchall() == [
        (f"{type(error).__name__}: {error}", failures, outages)
    ]


def test_an_application_that_does_not_know_its_database_is_told_what_to_set(
    feed: CommitFeed, connection: Connection, db: str
) -> None:
    """Takes seconds if this test starts the worker's Spark session."""
    with pytest.raises(InvalidArgument, match="set PGCHANGE_RESULTS"), batch_job(claimed(feed, db)):
        pass


def test_the_application_of_the_guide_adds_each_payment(connection: Connection, db: str) -> None:
    """Takes seconds if this test starts the worker's Spark session."""
    track_payments(connection)
    handle = claimed(CommitFeed("report", 1), db)
    guide = Guide("docs/how-to/detached.md", db, connection)
    with patch.dict(os.environ, {"PGCHANGE_RESULTS": db}):
        guide.run("In Spark", [("sys.argv[1]", repr(str(handle)))])
    assert detached.ack(handle, db, staged=True)
    balances = connection.execute("select account, cents from public.balance order by account").fetchall()
    assert balances == [("ann", 70), ("bob", 50)]
