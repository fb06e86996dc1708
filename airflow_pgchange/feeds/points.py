"""Points in a feed: has a consumer processed all that was there at some moment, or a given commit?

Asked of the source's primary: a standby may not have what the point is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from airflow_pgchange.feeds.asking import ask
from airflow_pgchange.feeds.commit import CommitFeed
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import Feed, Position
from airflow_pgchange.feeds.watching import NOWHERE

Point = Mapping[str, Any]


def point(source: psycopg.Connection[Any], feed: Feed) -> dict[str, Any]:
    """Everything of the feed that is committed now, as plain JSON."""
    taken: dict[str, Any] = ask(source, _select("pubsub.point", _branch(feed)))
    return taken


def passed(feed: Feed, position: Position | None, goal: Point | int) -> sql.Composed:
    """source: whether a consumer at ``position`` has processed everything up to a point, or the commit of
    that id.

    A consumer without a position has not begun.
    """
    at = Jsonb(dict(NOWHERE if position is None else position))
    if isinstance(goal, int):
        return _select("pubsub.passed_commit", _branch(feed), at, goal)
    return _select("pubsub.passed", _branch(feed), at, Jsonb(dict(goal)))


def has_passed(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed, goal: Point | int
) -> bool:
    """Whether the consumer has processed everything up to a point, or the commit of that id."""
    return bool(ask(source, passed(feed, ask(results, feed.position()), goal)))


def _branch(feed: Feed) -> int:
    if not isinstance(feed, CommitFeed):
        raise InvalidArgument(f"{feed.name}: points are of the commit queue; a {feed.kind} feed has none")
    return feed.branch_id


def _select(function: str, *arguments: Any) -> sql.Composed:
    return sql.SQL("select {}({})").format(
        sql.Identifier(*function.split(".")), sql.SQL(", ").join(map(sql.Literal, arguments))
    )
