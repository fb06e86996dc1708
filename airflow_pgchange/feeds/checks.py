"""Checks of what callers give; each raises InvalidArgument, and says what would do."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, get_args

from airflow_pgchange.feeds.errors import InvalidArgument

LONGEST_TIME = timedelta(days=36525)

OnBusy = Literal["wait", "skip", "fail"]
"""What to do while another transaction works on a feed."""
OnGiveUp = Literal["fail", "dead_letter"]
"""What to do with a batch that has failed as often as it may."""


def check_count(name: str, value: int) -> None:
    """Raise InvalidArgument for anything but a whole number from 1 to the largest that PostgreSQL calls an integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InvalidArgument(f"{name} must be a number from 1 to {2**31 - 1}, not {value!r}")


def check_plan(on_busy: str, **at_least_one: int | None) -> None:
    """Raise InvalidArgument for an ``on_busy`` that there is not, and for a number that is neither None nor a count."""
    if on_busy not in get_args(OnBusy):
        raise InvalidArgument(f"on_busy must be one of {', '.join(get_args(OnBusy))}, not {on_busy!r}")
    for name, value in at_least_one.items():
        if value is not None:
            check_count(name, value)


def check_on_give_up(on_give_up: str, max_attempts: int | None) -> None:
    """Raise InvalidArgument for what cannot be done with a batch that fails again and again."""
    if on_give_up not in get_args(OnGiveUp):
        raise InvalidArgument(
            f"on_give_up must be one of {', '.join(get_args(OnGiveUp))}, not {on_give_up!r}"
        )
    if on_give_up == "dead_letter" and max_attempts is None:
        raise InvalidArgument("on_give_up='dead_letter' needs max_attempts: how often a batch is tried first")


def check_group_name(group: str) -> None:
    """Raises InvalidArgument for an invalid group name."""
    # A slash separates it from a handler's name.
    if not isinstance(group, str) or not 1 <= len(group) <= 48 or not is_sendable(group) or "/" in group:
        raise InvalidArgument(
            f"the name of a group is 1 to 48 characters without a slash, not {group!r:.300}: name it otherwise"
        )


def check_duration(name: str, value: timedelta, *, above: bool = False) -> None:
    """Raise InvalidArgument for what is no length of time, or one at whose end there is no date in a database."""
    if not isinstance(value, timedelta) or not timedelta() <= value <= LONGEST_TIME or (above and not value):
        least = "above zero, at most" if above else "from 0 to"
        raise InvalidArgument(
            f"{name} must be a timedelta {least} {LONGEST_TIME.days} days, not {value!r:.300}"
        )


def is_sendable(text: str) -> bool:
    """Whether PostgreSQL can hold a text."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)
