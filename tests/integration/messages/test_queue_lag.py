"""The lag of a queue's consumer, and whether it has reached a point."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed, end_position
from airflow_pgchange.feeds.consumer_state import lag as feed_lag
from tests import queues

pytestmark = pytest.mark.hstore

FEED = QueueFeed("q")


@pytest.fixture
def connection(connect):
    connection = connect()
    queues.make(connection)
    return connection


def lag(connection, upto=10):
    return feed_lag(connection, connection, FEED, upto)


def test_the_lag_counts_what_is_ready_and_what_waits(db, connection):
    queues.fill(connection, range(3))
    queues.post(connection, 3, delay="1 hour")
    queues.post(connection, 4, after=queues.fill(connection, ["first"]))
    found = lag(connection)
    assert (found.ready, found.ready_exact, found.waiting, found.waiting_exact) == (4, True, 2, True)
    assert found.ready_age is not None
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        assert (lag(connection).ready, lag(connection).waiting) == (0, 2)
        consumer.ack()
    assert (lag(connection).ready, lag(connection).waiting) == (1, 1)


def test_a_batch_that_nobody_works_on_is_ready(db, connection):
    queues.fill(connection, range(3))
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)
        raise ZeroDivisionError("poison")
    assert lag(connection).ready == 3


def test_the_lag_of_a_backlog_is_an_estimate(db, connection):
    queues.fill(connection, range(3000))
    found = lag(connection, 10)
    assert (found.ready, found.ready_exact) == (3000, False)


@pytest.mark.parametrize("first", ["few", "many"])
def test_the_estimate_leaves_out_what_a_selector_does_not_want(connection, first):
    """The order in which wanted and other messages were posted does not matter."""
    queues.consumer(connection, "few", "(t.data->'n') = 'few'")
    posted = [["few"] * 1500, ["many"] * 9000]
    for numbers in posted if first == "few" else posted[::-1]:
        queues.fill(connection, numbers)
    found = feed_lag(connection, connection, QueueFeed("q", "few"), 100)
    assert 750 <= found.ready <= 3000
    assert not found.ready_exact


@pytest.mark.parametrize("upto", [-1, None])
def test_ready_changes_are_counted_up_to_a_number(connection, upto):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="upto must not be negative"):
        connection.execute("select mbus.lag('q', 'default', %s)", [upto])


def test_a_point_is_passed_when_all_before_it_is_received(db, connection):
    queues.fill(connection, range(3))
    goal = end_position.point(connection, FEED)
    queues.fill(connection, [3])
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(2)
        consumer.ack()
    assert not end_position.has_passed(connection, connection, FEED, goal)[0]
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        assert not end_position.has_passed(connection, connection, FEED, goal)[0]
        consumer.ack()
    assert end_position.has_passed(connection, connection, FEED, goal)[0]
