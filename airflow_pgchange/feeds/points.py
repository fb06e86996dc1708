"""Points in a feed: has a consumer processed all that was there at some moment?

Asked of the source's primary: a standby may not have what the point is about.
"""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.feeds.feed import NOWHERE, Feed, Goal, progress_at
from airflow_pgchange.feeds.queries import ask


def point(source: psycopg.Connection[Any], feed: Feed) -> dict[str, Any]:
    """Everything of the feed that is committed now, as plain JSON."""
    taken: dict[str, Any] = ask(source, feed.point())
    return taken


def has_passed(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed, goal: Goal
) -> tuple[bool, dict[str, Any], bool]:
    """Whether the consumer has come to the goal; the goal to ask with the next time, when it is cheaper; and whether the
    consumer has begun."""
    position = ask(progress_at(feed, results, source), feed.position())
    answer = ask(source, feed.passed(position or NOWHERE, goal))
    return answer["passed"], answer["goal"], position is not None
