"""The history of all feeds is trimmed by age, size and number, but only after every consumer has processed it."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import findings, maintain, trim
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import CommitFeed
from tests import event_keeping
from tests.commits import commits, drain, narrow_partitions, use_up_transactions
from tests.topology import make_catalogue
from tests.waiting import until

LIMITS = [{"retention_count": 3}, {"retention_bytes": 100_000}]
BY_LIMIT = pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: next(iter(limits)))


def settled_partitions(connection, each):
    """Create partitions of the commit queue with this number of commits each, which are not written any more."""
    narrow_partitions(connection)
    for _ in range(3):
        commits(connection, each)
        use_up_transactions(connection)
        connection.execute("select revision.maintain_partitions(50, 2)")
    connection.execute("analyze revision.commit_queue")


def told_to_a_person(connection):
    return [finding.told for finding in findings(connection) if "retention" in finding.told]


def queued(connection):
    return connection.execute("select count(*) from revision.commit_queue").fetchone()[0]


@BY_LIMIT
def test_a_commit_queue_within_its_limits_is_whole_and_one_beyond_loses_its_oldest(db, connect_to, limits):
    connection = connect_to(db)
    settled_partitions(connection, 2)
    drain(db)
    assert trim(connection, retention_count=6).done == []
    assert trim(connection, retention_bytes="1 GB").done == []
    report = trim(connection, **limits)
    assert report.failed == []
    assert any("trimmed 2 commits" in line for line in report.done)
    assert queued(connection) < 6
    assert told_to_a_person(connection) == []


def test_a_consumer_that_keeps_the_queue_above_its_limits_is_named_and_loses_nothing(db, connect_to):
    connection, limits = connect_to(db), LIMITS[0]
    settled_partitions(connection, 2)
    drain(db)
    connection.execute("select pubsub.lock_watermark('slow', 0)")
    report = maintain(connection, **limits)
    told = "the commit queue is larger than its retention: commits:slow/0 has not processed the oldest of it"
    assert any(told in line for line in report.attention)
    assert queued(connection) == 6
    assert told_to_a_person(connection) == [told]
    assert len(drain(db, feed=CommitFeed("slow", 0))) == 6
    maintain(connection, **limits)
    assert queued(connection) < 6
    assert told_to_a_person(connection) == []


def test_events_beyond_the_limits_go_once_every_group_has_read_them(db, connect_to):
    connection, limits = connect_to(db), {"retention_count": 3, "retention_bytes": 0}
    event_keeping.subscribe(connection)
    event_keeping.narrow(connection)
    event_keeping.configure(connection, partition_retention_period="1 day")
    event_keeping.maintain(connection)
    ids = event_keeping.publish(connection, 5)
    event_keeping.dispatch(connection)
    until(
        connection, "select max(id) < pgmb.create_event_id(now() - interval '1 second', 0) from pgmb.events"
    )
    assert not any("emptied" in line for line in maintain(connection, retention_count=5).done)
    maintain(connection, **limits)
    (told,) = told_to_a_person(connection)
    assert told.endswith("group g has not read it")
    assert event_keeping.read(connection) == ids
    maintain(connection, **limits)
    assert event_keeping.kept(connection) == []
    assert told_to_a_person(connection) == []


def test_the_log_of_a_catalogue_is_trimmed_by_number_unless_a_consumer_needs_it(db, connect_to):
    connection = connect_to(db)
    make_catalogue(connection)
    (events,) = connection.execute("select count(*) from topology.log").fetchone()
    connection.execute("select topology.register('slow')")
    report = maintain(connection, retention_count=1)
    assert any("topology:slow has not processed the oldest of it" in line for line in report.attention)
    connection.execute("select topology.forget('slow')")
    maintain(connection, retention_count=2)
    assert connection.execute("select count(*) from topology.log").fetchone() == (2,)
    assert events > 2


@pytest.mark.parametrize(
    "limits", [{"retention_count": 0}, {"retention_bytes": "much"}, {"retention": "-1 s"}]
)
def test_limits_that_say_nothing_are_refused(shared_db, connect_to, limits):
    with pytest.raises(InvalidArgument, match=next(iter(limits))):
        maintain(connect_to(shared_db), **limits)
