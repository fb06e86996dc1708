"""A source that is no longer the source of the watermark: every function that would continue reports it."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import consumers, manual_operations
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import SourceLostTail, SourceRestored
from airflow_pgchange.feeds import end_position
from airflow_pgchange.feeds.consumer_state import lag
from tests.commits import FEED, commits, drain

QUESTIONS = pytest.mark.parametrize(
    "ask",
    [
        lambda results, source, point: lag(results, source, FEED),
        lambda results, source, point: end_position.has_passed(results, source, FEED, point),
    ],
    ids=["lag", "passed"],
)
LOST = "delete from pgchange.claim"
RESTORED = "update revision.origin set written_in = '3'"


@pytest.fixture
def apart(db, other_db, connect_to):
    """Yield the database of the results, that of the source, and a position in the source that the consumer has
    processed."""
    results, source = connect_to(db), connect_to(other_db)
    commits(source, 3)
    drain(db, other_db)
    return results, source, end_position.point(source, FEED)


@QUESTIONS
def test_a_source_that_lost_its_latest_transactions_is_reported(apart, ask):
    apart[1].execute(LOST)
    with pytest.raises(SourceLostTail, match="airflow-pgchange repair"):
        ask(*apart)


@QUESTIONS
def test_a_source_that_was_restored_is_reported(apart, ask):
    apart[1].execute(RESTORED)
    with pytest.raises(SourceRestored, match="rebase_after_restore"):
        ask(*apart)


@QUESTIONS
def test_another_source_than_that_of_the_watermark_is_reported(apart, ask):
    apart[0].execute("update pubsub.watermark set source = 'elsewhere'")
    with pytest.raises(SourceRestored, match="another database"):
        ask(*apart)


def test_a_point_of_another_cluster_is_never_passed(apart):
    results, source, point = apart
    with pytest.raises(SourceRestored, match="take a new point"):
        end_position.has_passed(results, source, FEED, {**point, "source": "1"})


@pytest.mark.parametrize(("harm", "says"), [(LOST, "lost its latest"), (RESTORED, "rebase_after_restore")])
def test_status_says_what_a_person_must_decide(apart, harm, says):
    results, source, _ = apart
    source.execute(harm)
    (shown,) = consumers.status(results, source)
    assert shown["ready"] is None
    assert says in shown["held_back_by"]


def test_status_and_maintenance_of_a_restored_database_say_what_to_run(db, connect):
    connection = connect()
    commits(connection)
    drain(db)
    connection.execute(RESTORED)
    (shown,) = consumers.status(connection)
    assert "rebase_after_restore" in shown["held_back_by"]
    assert any("rebase_after_restore" in line for line in maintain(connection).attention)


def test_a_restored_queue_is_not_trimmed(db, connect):
    connection = connect()
    commits(connection)
    drain(db)
    connection.execute(RESTORED)
    with pytest.raises(SourceRestored, match="rebase_after_restore"):
        manual_operations.trim_commit_queue(connection, "0 s")


def test_a_standby_that_is_merely_late_is_not_accused(own_cluster, own_database, connect_to):
    connection = connect_to(own_database)
    standby = own_cluster.standby()
    try:
        standby.wait_for_replay(own_cluster)
        there = connect_to(standby.conninfo())
        there.execute("select pg_wal_replay_pause()")
        commits(connection)
        drain(own_database)
        assert lag(connection, there, FEED).ready == 0
    finally:
        standby.remove()
