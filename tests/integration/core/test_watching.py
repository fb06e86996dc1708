"""The reasons why a feed cannot be watched, as ``airflow-pgchange check`` finds them."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin.watch_checks import hindrance
from airflow_pgchange.feeds import CommitFeed, TubeFeed
from tests.commits import FEED, commits


def test_nothing_keeps_a_feed_from_being_watched_whose_consumer_has_yet_to_begin(connect):
    connection = connect()
    commits(connection, 1)
    assert hindrance(connection, connection, FEED) is None


@pytest.mark.parametrize(
    ("feed", "named"),
    [(CommitFeed("test", 4711), "4711"), (TubeFeed("no_such"), "no_such")],
    ids=["branch", "tube"],
)
def test_a_feed_that_is_not_there_is_named(connect, feed, named):
    connection = connect()
    told = hindrance(connection, connection, feed)
    assert told is not None
    assert named in told
