"""Arguments as Airflow hands them over: rendered templates arrive as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from airflow_pgchange.feeds import feed as feeds
from airflow_pgchange.feeds.checks import check_count
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import Feed, Watched

FeedLike = Watched | Mapping[str, Any] | str
"""A feed, its JSON as a mapping or as text, or its asset URI."""

MOST_SECONDS = 1e9

Seconds = float | str | timedelta
"""A number of seconds, also as text, or a timedelta."""

Until = Literal["empty"] | Seconds
"""``empty``, or how long."""


def feed_of(value: FeedLike) -> Feed:
    """The feed that an argument means. Raises InvalidArgument where it means none."""
    feed = watched_of(value)
    if not isinstance(feed, Feed):
        raise InvalidArgument(
            f"{feed.name} can be waited for, but gives no batches: name the feed of one worker"
        )
    return feed


def watched_of(value: FeedLike) -> Watched:
    """What an argument says to wait for: a feed, or several at once. Raises InvalidArgument where it says nothing."""
    if isinstance(value, Watched):
        return value
    if isinstance(value, str):
        if value.startswith("pgchange://"):
            return feeds.from_uri(value)[0]
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidArgument(
                f"{value!r} is not a feed: give a feed, its JSON or its asset URI"
            ) from error
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{value!r} is not a feed: give a feed, its JSON or its asset URI")
    return feeds.from_json(
        {key: _plain(item) if key in _not_text(value) else item for key, item in value.items()}
    )


def wake_rule(min_changes: int, max_wait: float | timedelta | None) -> tuple[int, float | None]:
    """How many changes, or how many seconds of waiting, deserve a wake-up. Raises InvalidArgument."""
    seconds = max_wait.total_seconds() if isinstance(max_wait, timedelta) else max_wait
    check_count("min_changes", min_changes)
    if seconds is not None and seconds < 0:
        raise InvalidArgument(f"max_wait must not be negative, and is {seconds:g} seconds")
    return min_changes, seconds


def until_of(value: Until) -> Literal["empty"] | float:
    """How long to work: until nothing is left, or so many seconds. Raises InvalidArgument."""
    if value == "empty":
        return "empty"
    try:
        number = seconds("until", value)
    except InvalidArgument:
        number = 0
    if number == 0:
        raise InvalidArgument(f"until must be 'empty' or a number of seconds, not {value!r}")
    return number


def json_of(value: FeedLike) -> Mapping[str, Any] | str:
    """The same argument as something that Airflow can render, show and store."""
    return feeds.to_json(value) if isinstance(value, Watched) else value


def names(what: str, value: Sequence[str] | str | None) -> list[str]:
    """Names: those of a list as they stand, or those of a text with commas between. Raises InvalidArgument for none."""
    given = [name.strip() for name in value.split(",")] if isinstance(value, str) else value or ()
    found = [name for name in given if name.strip()]
    if not found:
        raise InvalidArgument(f"{what}: name at least one, not {value!r}")
    return found


def whole(what: str, value: float | str | None) -> int | None:
    """A whole number that PostgreSQL takes for an integer, also as the text or the 20000.0 that a form makes of it; None
    for none. Raises InvalidArgument."""
    if value is None or value == "":
        return None
    number = _number(what, value)
    if not number.is_integer() or not -(2**31) <= number < 2**31:
        raise InvalidArgument(f"{what} must be a whole number from {-(2**31)} to {2**31 - 1}, not {value!r}")
    return int(number)


def seconds(what: str, value: Seconds) -> float:
    """A number of seconds, from none to some thirty years. Raises InvalidArgument."""
    number = value.total_seconds() if isinstance(value, timedelta) else _number(what, value)
    if not 0 <= number <= MOST_SECONDS:
        raise InvalidArgument(f"{what} must be from 0 to {MOST_SECONDS:g} seconds, not {value!r}")
    return number


def patience(what: str, value: Seconds | None) -> float | None:
    """How many seconds to wait; None: as long as it takes. Raises InvalidArgument."""
    return None if value is None else seconds(what, value)


def _number(what: str, value: float | str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} must be a number, not {value!r}") from error
    if not math.isfinite(number):
        raise InvalidArgument(f"{what} must be a number, not {value!r}")
    return number


def _not_text(data: Mapping[str, Any]) -> set[str]:
    kind = feeds.FEEDS.get(str(data.get("kind")))
    annotations = {} if kind is None else kind.__annotations__
    return {name for name, annotation in annotations.items() if annotation in ("int", "bool", "float")}


def _plain(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    try:
        return json.loads(item.lower())
    except json.JSONDecodeError:
        return item
