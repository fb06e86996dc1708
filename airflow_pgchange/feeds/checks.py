"""Checks of what callers give; each raises InvalidArgument, and says what would do."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from airflow_pgchange.errors import InvalidArgument

Seconds = float | str | timedelta
"""A length of time: a number of seconds, the text of one or of a span such as ``30 days``, or a timedelta."""
Until = Literal["empty"] | Seconds
"""``empty``: until nothing is left, or how long."""
MOMENT = timedelta(microseconds=1)
LONGEST = timedelta(days=36525)
UNITS = {
    "second": 1,
    "sec": 1,
    "s": 1,
    "minute": 60,
    "min": 60,
    "hour": 3600,
    "h": 3600,
    "day": 86400,
    "week": 604800,
}
SPAN = re.compile(rf"([0-9.]+) *({'|'.join(UNITS)})s?", re.ASCII)

BATCH_LIMIT = 100_000
"""The default of ``limit`` for the changes of a batch: a callable may keep the ids of all of them in memory."""
SPARK_LIMIT = 1_000_000
"""The same for a batch in Spark: its start takes seconds, which are worth it for a large batch."""
EVENTS_LIMIT = 1_000
"""The default of ``limit`` for events that are published or handled at once: their payloads are in memory."""

OnBusy = Literal["wait", "skip", "fail"]
"""What to do while another transaction works on a feed."""
OnGiveUp = Literal["fail", "dead_letter"]
"""What to do with a batch that has failed as often as it may."""


def check_count(name: str, value: int) -> None:
    """Raise InvalidArgument for anything but a whole number from 1 to the largest that PostgreSQL calls an integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InvalidArgument(f"{name} must be a number from 1 to {2**31 - 1}, not {value!r}")


def check_word(name: str, value: Any, words: Any) -> None:
    """Raise InvalidArgument for anything but a word of a ``Literal``."""
    if value not in get_args(words):
        raise InvalidArgument(f"{name} must be one of {', '.join(get_args(words))}, not {value!r:.300}")


def check_give_up(on_give_up: str, max_attempts: Any) -> None:
    """Raise InvalidArgument for what cannot be done with a batch that fails again and again."""
    if on_give_up == "dead_letter" and max_attempts is None:
        raise InvalidArgument("on_give_up='dead_letter' needs max_attempts: how often a batch is tried first")


def check_group_name(group: str) -> None:
    """Raises InvalidArgument for an invalid group name."""
    # A slash separates it from a handler's name.
    if not isinstance(group, str) or not 1 <= len(group) <= 48 or not is_sendable(group) or "/" in group:
        raise InvalidArgument(
            f"the name of a group is 1 to 48 characters without a slash, not {group!r:.300}: name it otherwise"
        )


def seconds(name: str, value: Seconds, *, least: timedelta = timedelta(), most: timedelta = LONGEST) -> float:
    """A length of time in seconds. Raises InvalidArgument for what is none, or is shorter or longer than it may be."""
    number = _in_seconds(value)
    if not least.total_seconds() <= number <= most.total_seconds():
        raise InvalidArgument(
            f"{name} must be a length of time from {shown(least)} to {shown(most)}, not {value!r:.300}: "
            "seconds, a timedelta, or a text such as '90' or '30 days'"
        )
    return number


def patience(name: str, value: Seconds | None) -> float | None:
    """How many seconds to wait; None: as long as it takes. Raises InvalidArgument."""
    return None if value is None else seconds(name, value)


def span(name: str, value: Seconds | None) -> timedelta | None:
    """A length of time as PostgreSQL's driver takes it; None for none. Raises InvalidArgument."""
    return None if value is None else timedelta(seconds=seconds(name, value))


def until(name: str, value: Until) -> Literal["empty"] | float:
    """How long to work: until nothing is left, or so long. Raises InvalidArgument."""
    return "empty" if value == "empty" else seconds(f"{name}, unless it is 'empty',", value, least=MOMENT)


def _in_seconds(value: Seconds) -> float:
    """NaN for what is no length of time."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    span = SPAN.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if span is not None:
            return float(span[1]) * UNITS[span[2]]
        return math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def shown(time: timedelta) -> str:
    """A length of time as a person writes it."""
    days = time / timedelta(days=1)
    return f"{days:g} days" if days >= 1 else f"{time.total_seconds():g} s"


def is_name(value: Any) -> bool:
    """Whether it is a text that PostgreSQL can hold, and not empty."""
    return isinstance(value, str) and value != "" and is_sendable(value)


def is_sendable(text: str) -> bool:
    """Whether PostgreSQL can hold a text."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def time_of(what: str, value: datetime | str) -> datetime:
    """A time, also as its ISO 8601 text. Raises InvalidArgument."""
    try:
        return value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{what}: {value!r:.300} is not a time: write it as 2026-01-31T12:00:00+00:00"
        ) from error
