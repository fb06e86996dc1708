"""Where a new consumer starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any

import psycopg

from airflow_pgchange.errors import InvalidArgument, UnknownConsumer
from airflow_pgchange.feeds.argument_checks import time_of
from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.connections import read_only
from airflow_pgchange.feeds.feed import BEGINNING, NOWHERE, Feed, Movable, Position, progress_at
from airflow_pgchange.feeds.queries import ask, rows

log = logging.getLogger(__name__)

Start = datetime | str | Mapping[str, Any]
"""``"beginning"``: the first change that the source still has. ``"now"``: after all changes that are committed. A time,
also as ISO 8601 text: after all changes that were written before it. Or a point that
``airflow_pgchange.feeds.end_position.point`` returned."""
NOW = "now"
COUNTED = 1000
"""The number of changes before a new consumer up to which they are counted exactly."""


def check_start(start: Start) -> None:
    """Raise InvalidArgument unless a consumer can start there."""
    if isinstance(start, Mapping):
        if not isinstance(start.get("source"), str):
            raise InvalidArgument(
                f"start: {dict(start)!r:.300} is not a point: give what feeds.end_position.point() returned, whole"
            )
    elif start not in (BEGINNING, NOW):
        time_of("start ('beginning', 'now', a time or a point)", start)


def may_start(source: psycopg.Connection[Any], feed: Feed, position: Position | None) -> bool:
    """Whether the consumer is not registered, or is registered and may not be at its start yet.

    A consumer that has a batch in work is not new. This function asks for such a batch, because the first batch may be
    tried many times.
    """
    if position is None:
        return True
    if not isinstance(feed, Movable) or feed.start == BEGINNING or has_moved(position):
        return False
    return ask(source, feed.in_work(position)) is None


def has_moved(position: Position) -> bool:
    """Whether a consumer has processed anything, or was moved. Handlers of events move a cursor, and claim no batch."""
    return position["version"] > 0 or bool(position.get("cursor"))


def start(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed, register: bool = True
) -> None:
    """Register a new consumer and put it at its start, in one transaction.

    A consumer that has claimed or that was moved stays where it is, whatever its feed says. ``results`` and ``source``
    are primaries. Raises UnknownConsumer for a consumer that is not registered, unless ``register`` is true.
    """
    keeper = progress_at(feed, results, source)
    is_new = ask(keeper, feed.position()) is None
    if is_new and not register:
        raise UnknownConsumer(
            f"{feed.name} is not registered here, and registration is off for consumers: check its name, or run "
            f"`airflow-pgchange register`{_similar(source, feed)}"
        )
    with keeper.transaction():
        ask(keeper, feed.register())
        # If another transaction holds the lock, it has placed the consumer already, or is placing it now.
        placed = bool(ask(keeper, feed.lock())) and _place(keeper, source, feed)
        # Query the lag before the commit: it fails if the feed names an object that does not exist. Otherwise a misspelt
        # name would register a new consumer.
        position = ask(keeper, feed.position())
        lag = Lag(**ask(source, feed.lag(position or NOWHERE, COUNTED)))
    if placed or (is_new and position is not None):
        at = feed.start if isinstance(feed, Movable) and placed else BEGINNING
        log.info(
            "%s: new consumer, %s%s",
            feed.name,
            start_text(str(at), lag),
            _similar(source, feed) if is_new else "",
        )


@dataclass(frozen=True)
class Outlook:
    """How a consumer that is not registered will start. ``lag`` is None if the start is not the beginning."""

    at: str
    lag: Lag | None
    similar: str

    def __str__(self) -> str:
        return start_text(self.at, self.lag) + self.similar


def outlook(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed, at: str
) -> Outlook | None:
    """Return how a consumer that is not registered will start, if its start is ``at``; None for any other consumer.
    ``source`` may be any server."""
    keeper = progress_at(feed, results, source)
    if ask(keeper, feed.position()) is not None:
        return None
    lag = None
    if at == BEGINNING:
        with read_only(source):
            lag = Lag(**ask(source, feed.lag(NOWHERE, COUNTED)))
    return Outlook(at, lag, _similar(source, feed))


def start_text(at: str, lag: Lag | None) -> str:
    """Return where a new consumer starts, with the number of changes there. The log, ``check``, ``status`` and the page
    share these words."""
    if "{{" in at:
        return f"starts where its run says: {at}"
    place = f"the {BEGINNING}" if at == BEGINNING else at
    if lag is None:
        return f"starts at {place}"
    more = "" if lag.ready_exact else "more than "
    number = lag.ready if lag.ready_exact else COUNTED
    return f"starts at {place}: {more}{number:,} change{'' if number == 1 else 's'}"


def _place(keeper: psycopg.Connection[Any], source: psycopg.Connection[Any], feed: Feed) -> bool:
    """Put a consumer at its start; the caller holds its lock. Return whether it was new and its start is not the
    beginning."""
    if not isinstance(feed, Movable) or feed.start == BEGINNING:
        return False
    point = feed.start
    if not isinstance(point, Mapping):
        point = ask(source, feed.point_at(None if point == NOW else point))
    version = ask(source, feed.note_start(ask(keeper, feed.position()), point))
    return version is not None and bool(ask(keeper, feed.start_at(point, version)))


def _similar(source: psycopg.Connection[Any], feed: Feed) -> str:
    """Return a note about a consumer of the same kind with a similar name, because the new name may be a typing error.
    Empty if there is no such consumer."""
    if not isinstance(feed, Movable):
        return ""
    others = [name for (name,) in rows(source, feed.consumer_names()) if name != feed.name]
    similar = get_close_matches(feed.name, others, n=1, cutoff=0.8)
    return f". A consumer of a similar name exists: {similar[0]}" if similar else ""
