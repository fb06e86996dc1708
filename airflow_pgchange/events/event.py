"""An event, and the event ids, which contain a time and so order and schedule events."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.event_log import EPOCH

MICROSECOND = timedelta(microseconds=1)
LATEST = EPOCH + (2**52 - 1) * MICROSECOND
"""The latest time that the 13 hexadecimal digits in an id can hold, in the year 2112."""
ID = re.compile(r"pm[0-9a-f]{22}")
TOPIC_LENGTH = 255
BEYOND_FLOATS = 10**309


@dataclass(frozen=True)
class Event:
    """One event of the log.

    ``payload`` is any value that JSON can represent. ``at`` is a time with a zone: the event is not delivered before it.
    ``subscription_id``: only this subscription gets the event. ``id``: the server generates it unless you give one; a
    second event with the same id is refused. ``subscriptions``: of an event that was read, the subscriptions to which it
    was dispatched. Raises InvalidArgument for invalid values.
    """

    topic: str
    payload: Any = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    at: datetime | None = None
    subscription_id: str | None = None
    id: str | None = None
    subscriptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.topic, str) or not 1 <= len(self.topic) <= TOPIC_LENGTH or "\0" in self.topic:
            raise InvalidArgument(
                f"a topic is 1 to {TOPIC_LENGTH} characters of text, not {self.topic!r:.300}"
            )
        if not isinstance(self.metadata, Mapping):
            raise InvalidArgument(
                f"the metadata of an event {self.topic!r} are a mapping, not {self.metadata!r:.300}"
            )
        if not isinstance(self.subscription_id, str | None):
            raise InvalidArgument(f"the id of a subscription is a text, not {self.subscription_id!r:.300}")
        if self.id is not None and not (isinstance(self.id, str) and ID.fullmatch(self.id)):
            raise InvalidArgument(f"{self.id!r:.300} is not the id of an event: pm and 22 hexadecimal digits")
        if self.at is not None and self.id is not None:
            raise InvalidArgument(f"event {self.id} has a time in its id: give either at or id")
        if self.at is not None and not (
            isinstance(self.at, datetime) and self.at.tzinfo is not None and EPOCH <= self.at <= LATEST
        ):
            raise InvalidArgument(
                f"at must be a time with a zone, from {EPOCH:%Y} to {LATEST:%Y}, not {self.at!s:.300}"
            )


def shown(event: Event) -> dict[str, Any]:
    """Return an event as a dict for JSON, as webhooks, retries and dead letters contain it."""
    return {
        "id": event.id,
        "topic": event.topic,
        "payload": event.payload,
        "metadata": dict(event.metadata),
    }


@dataclass(frozen=True)
class Row:
    """An event with its payload and metadata as JSON text. Later changes of the payload object have no effect."""

    event: Event
    payload: str
    metadata: str

    @property
    def size(self) -> int:
        """The approximate memory of the row in bytes."""
        return 1000 + 2 * len(self.payload) + 2 * len(self.metadata)


def row_of(event: Event) -> Row:
    """Convert an event to a row. Raises InvalidArgument if its payload or metadata cannot be JSON."""
    return Row(event, _json(event, "payload", event.payload), _json(event, "metadata", dict(event.metadata)))


def event_id(at: datetime, number: int) -> str:
    """Return the event id of a time, in microseconds, and of the lowest 36 bits of a number.

    A time before 1970 or after 2112 is replaced by the nearest time that an id can hold.
    """
    return id_of_microsecond((min(max(at, EPOCH), LATEST) - EPOCH) // MICROSECOND, number)


def id_of_microsecond(microsecond: int, number: int) -> str:
    return f"pm{microsecond:013x}{number & (2**36 - 1):09x}"


def text_of(value: Any) -> str:
    """Return JSON text for a value that was parsed from JSON.

    The parser reads a number that is too large for a float as infinity, which JSON does not have. It is written as a
    number that is too large for a float again.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if value in (math.inf, -math.inf):
        return BEYOND_FLOATS if value > 0 else -BEYOND_FLOATS
    return value


def _json(event: Event, name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"the {name} of an event {event.topic!r} is not JSON: {error}") from error
