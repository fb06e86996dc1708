"""Points in a feed: whether a consumer has processed everything that existed at some moment.

The queries need the primary of the source, because a standby may lack changes before the point.
"""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.feeds.feed import NOWHERE, Feed, Goal, progress_at
from airflow_pgchange.feeds.queries import ask


def point(source: psycopg.Connection[Any], feed: Feed) -> dict[str, Any]:
    """Return the point after everything of the feed that is committed now, as JSON."""
    taken: dict[str, Any] = ask(source, feed.point())
    return taken


def has_passed(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed, goal: Goal
) -> tuple[bool, dict[str, Any], bool]:
    """Return whether the consumer has reached the goal, the goal for the next query, and whether the consumer has begun.

    The returned goal makes the next query cheaper.
    """
    position = ask(progress_at(feed, results, source), feed.position())
    answer = ask(source, feed.passed(position or NOWHERE, goal))
    return answer["passed"], answer["goal"], position is not None
