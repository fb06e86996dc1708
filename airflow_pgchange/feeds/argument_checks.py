"""Checks of arguments. Each raises InvalidArgument, which says what is accepted."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from airflow_pgchange.errors import InvalidArgument

Seconds = float | str | timedelta
"""A length of time: a number of seconds, its text, a text such as ``30 days``, or a timedelta."""
Until = Literal["empty"] | Seconds
"""How long to work: ``empty``, until nothing is left, or a length of time."""
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

Bytes = int | str
"""A size: a number of bytes, or a text such as ``10 GB``."""
BYTES = {"": 1, "B": 1, "kB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
"""The units of PostgreSQL's ``pg_size_bytes``."""
SIZE = re.compile(rf"([0-9]+(?:\.[0-9]+)?) *({'|'.join(BYTES)})", re.ASCII)

BATCH_LIMIT = 100_000
"""The default of ``limit`` for the changes of a batch: a callable may keep the ids of all of them in memory."""
SPARK_LIMIT = 1_000_000
"""The default of ``limit`` for a batch in Spark. Starting Spark takes seconds, which only a large batch repays."""
OLDEST_SPARK = (4, 0)
"""Older versions of Spark have no data sources in Python."""
EVENTS_LIMIT = 1_000
"""The default of ``limit`` for events that are published or handled at once: their payloads are in memory."""

OnBusy = Literal["wait", "skip", "fail"]
"""The reaction to another transaction that works on the feed."""
OnGiveUp = Literal["bisect", "fail", "dead_letter"]
"""The reaction to a batch that has failed ``max_attempts`` times. ``bisect`` splits it until the bad change is alone.
``fail`` raises an error, and ``dead_letter`` makes the whole batch a dead letter."""


def check_count(name: str, value: int) -> None:
    """Raise InvalidArgument unless the value is a whole number from 1 to the largest ``integer`` of PostgreSQL."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InvalidArgument(f"{name} must be a number from 1 to {2**31 - 1}, not {value!r}")


def check_word(name: str, value: Any, words: Any) -> None:
    """Raise InvalidArgument unless the value is one of the words of a ``Literal``."""
    if value not in get_args(words):
        raise InvalidArgument(f"{name} must be one of {', '.join(get_args(words))}, not {value!r:.300}")


def check_give_up(on_give_up: str, max_attempts: Any) -> None:
    """Raise InvalidArgument if batches are to become dead letters, but the number of attempts is not limited."""
    if on_give_up == "dead_letter" and max_attempts is None:
        raise InvalidArgument(
            "on_give_up='dead_letter' needs max_attempts: after how many attempts to give up a batch"
        )


def check_group_name(group: str) -> None:
    """Raise InvalidArgument for an invalid name of a group."""
    # A slash is not allowed, because it separates the name of the group from that of a handler.
    if not isinstance(group, str) or not 1 <= len(group) <= 48 or not is_sendable(group) or "/" in group:
        raise InvalidArgument(
            f"the name of a group is 1 to 48 characters without a slash, not {group!r:.300}: name it otherwise"
        )


def seconds(name: str, value: Seconds, *, least: timedelta = timedelta(), most: timedelta = LONGEST) -> float:
    """Return a length of time in seconds. Raises InvalidArgument unless it is valid and from ``least`` to ``most``."""
    number = _in_seconds(value)
    if not least.total_seconds() <= number <= most.total_seconds():
        raise InvalidArgument(
            f"{name} must be a length of time from {shown(least)} to {shown(most)}, not {value!r:.300}: "
            "seconds, a timedelta, or a text such as '90' or '30 days'"
        )
    return number


def patience(name: str, value: Seconds | None) -> float | None:
    """Return the seconds to wait, or None for no limit. Raises InvalidArgument."""
    return None if value is None else seconds(name, value)


def span(name: str, value: Seconds | None) -> timedelta | None:
    """Return a length of time as a timedelta, which psycopg can send, or None. Raises InvalidArgument."""
    return None if value is None else timedelta(seconds=seconds(name, value))


def size(name: str, value: Bytes | None) -> int | None:
    """Return a size in bytes, or None. Raises InvalidArgument."""
    if value is None:
        return None
    text = (
        SIZE.fullmatch(str(value).strip())
        if isinstance(value, int | str) and not isinstance(value, bool)
        else None
    )
    number = float(text[1]) * BYTES[text[2]] if text is not None else math.nan
    if not 0 <= number < 2**63:
        raise InvalidArgument(f"{name} must be a size, as '10 GB', or a number of bytes, not {value!r:.300}")
    return int(number)


def until(name: str, value: Until) -> Literal["empty"] | float:
    """Return ``empty``, or the seconds to work. Raises InvalidArgument."""
    return "empty" if value == "empty" else seconds(f"{name}, unless it is 'empty',", value, least=MOMENT)


def _in_seconds(value: Seconds) -> float:
    """Return the seconds, or NaN if the value is no length of time."""
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
    """Return a length of time as text, for people."""
    days = time / timedelta(days=1)
    return f"{days:g} days" if days >= 1 else f"{time.total_seconds():g} s"


def is_name(value: Any) -> bool:
    """Whether the value is a text that is not empty and that PostgreSQL can store."""
    return isinstance(value, str) and value != "" and is_sendable(value)


def is_sendable(text: str) -> bool:
    """Whether PostgreSQL can store a text: it has no zero byte and no lone surrogate."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def time_of(argument: str, value: datetime | str) -> datetime:
    """Return a time that is given as a datetime or as ISO 8601 text. Raises InvalidArgument."""
    try:
        return value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{argument}: {value!r:.300} is not a time: write it as 2026-01-31T12:00:00+00:00"
        ) from error
