"""The first position of a new consumer, as an argument of a feed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_pgchange import CommitFeed, EventFeed, QueueFeed, TopologyFeed, TubeFeed
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import from_json, to_json
from airflow_pgchange.feeds.feed_kinds import from_uri, to_uri
from airflow_pgchange.feeds.start_position import start_text
from airflow_pgchange.triggers.feed import FeedTrigger

FEEDS = (CommitFeed, ("c", 0)), (EventFeed, ("g",)), (TopologyFeed, ("c",))
POINT = {"snapshot": "10:10:", "source": "here"}


@pytest.mark.parametrize(("kind", "parts"), FEEDS)
@pytest.mark.parametrize("start", ["now", "2026-01-31T12:00:00+00:00", POINT])
def test_the_start_is_no_part_of_what_a_feed_is(kind: Any, parts: Any, start: Any) -> None:
    feed, late = kind(*parts), kind(*parts, start=start)
    assert (late, hash(late), late.name, to_uri(late, "shop")) == (
        feed,
        hash(feed),
        feed.name,
        to_uri(feed, "shop"),
    )
    assert FeedTrigger(late, "shop").serialize() == FeedTrigger(feed, "shop").serialize()
    assert from_uri(to_uri(late, "shop"))[0].start == "beginning"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "parts"), FEEDS)
@pytest.mark.parametrize("start", ["now", "2026-01-31T12:00:00+00:00", POINT])
def test_the_start_is_kept_where_a_task_is_stored(kind: Any, parts: Any, start: Any) -> None:
    assert from_json(to_json(kind(*parts, start=start))).start == start  # type: ignore[attr-defined]
    assert "start" not in to_json(kind(*parts))


def test_a_time_is_stored_as_its_text() -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert to_json(CommitFeed("c", 0, start=at))["start"] == "2026-01-31T12:00:00+00:00"


@pytest.mark.parametrize(
    ("start", "told"),
    [("soon", "'beginning', 'now', a time or a point"), ({}, "is not a point"), (7, "start")],
)
def test_an_invalid_start_is_refused(start: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        CommitFeed("c", 0, start=start)


@pytest.mark.parametrize(
    ("kind", "told"),
    [(TubeFeed, "Use a backfill for the rows from before"), (QueueFeed, "messages that are in the queue")],
)
def test_tubes_and_queues_have_no_start_and_say_where_they_begin(kind: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        kind("q", start="now")


def test_a_start_that_each_run_gives_is_shown_as_such() -> None:
    assert start_text("{{ params.start }}", None) == "starts where its run says: {{ params.start }}"
