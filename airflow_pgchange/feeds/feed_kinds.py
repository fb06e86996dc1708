"""The kinds of feeds, which this package and others register, and feeds as JSON and as the URIs of assets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.consumer_names import prefix_of
from airflow_pgchange.feeds.feed import BEGINNING, Watched

Kind = TypeVar("Kind", bound=type[Any])
CONDITIONS = ("min_changes", "max_age")
"""The fields of an asset's URI that define when the asset is updated. A feed must not have fields with these names."""
ENTRY_POINTS = "airflow_pgchange.feeds"
"""The group of entry points by which other packages register their classes of feeds."""

_kinds: dict[str, type[Any]] = {}


def kind_of_feed(feed: Kind) -> Kind:
    """Register a class of feeds by its ``kind``, for status, the command line, assets and triggers. Use as a decorator.

    Raises InvalidArgument if the names of its consumers have no prefix, or the prefix of another kind. The class must
    have no field of ``CONDITIONS``.
    """
    if taken := set(CONDITIONS) & set(getattr(feed, "__dataclass_fields__", ())):
        raise InvalidArgument(
            f"a {feed.kind} feed cannot have the field {', '.join(sorted(taken))}: the URI of its asset has a condition "
            "of that name; choose another name"
        )
    if hasattr(feed, "names"):
        _check_prefix(feed.kind, feed.names.prefix)
    _kinds[feed.kind] = feed
    return feed


def _check_prefix(kind: str, prefix: str) -> None:
    if prefix_of(prefix) != prefix or not prefix:
        raise InvalidArgument(
            f"consumers of kind {kind} cannot have names that begin with {prefix!r}: let them begin with a word and a "
            f"colon, such as {kind}:"
        )
    for other, feed in _kinds.items():
        if other != kind and hasattr(feed, "names") and feed.names.prefix == prefix:
            raise InvalidArgument(
                f"consumers of kind {kind} cannot have the prefix {prefix}: consumers of kind {other} have it; choose "
                f"another prefix, such as {kind}:"
            )


def kinds() -> Mapping[str, type[Any]]:
    """Return every kind of feed by its name, including those of other packages."""
    from_other_packages()
    return _kinds


def is_prefix(prefix: str) -> bool:
    """Whether this is the prefix of the consumers' names of some kind."""
    return any(hasattr(kind, "names") and kind.names.prefix == prefix for kind in kinds().values())


@cache
def from_other_packages() -> None:
    """Register the feeds that entry points name, once."""
    for entry in entry_points(group=ENTRY_POINTS):
        kind_of_feed(entry.load())


def identity(feed: object) -> dict[str, Any]:
    """Return the fields that identify the feed, by name: those that a comparison of two feeds looks at."""
    return {each.name: getattr(feed, each.name) for each in fields(feed) if each.compare}  # type: ignore[arg-type]


def to_json(feed: Watched) -> dict[str, Any]:
    """The feed as plain JSON, with the start of a new consumer if that is not the beginning."""
    start = getattr(feed, "start", None) or BEGINNING
    start_field = (
        {} if start == BEGINNING else {"start": start.isoformat() if isinstance(start, datetime) else start}
    )
    return {"kind": feed.kind, **identity(feed), **start_field}


def from_json(data: Mapping[str, Any]) -> Watched:
    """Return the feed that ``to_json`` wrote. Raises InvalidArgument for an unknown kind or field."""
    values = dict(data)
    kind = kinds().get(str(values.pop("kind", "")))
    if kind is None:
        raise InvalidArgument(
            f"unknown kind of feed in {dict(data)}: it must be one of {', '.join(sorted(kinds()))}"
        )
    try:
        feed: Watched = kind(**values)
    except TypeError as error:
        raise InvalidArgument(f"{data['kind']} feed: {error}") from error
    return feed


def to_uri(feed: Watched, server: str, conditions: Mapping[str, Any] | None = None) -> str:
    """Return the feed as an asset URI, ``pgchange://<server>/<kind>?...``; ``server`` is the name of a connection.

    ``conditions`` are the values of ``CONDITIONS`` that are not the defaults. Assets with different conditions are
    different assets.
    """
    values = {**identity(feed), **(conditions or {})}
    query = {key: json.dumps(value) for key, value in sorted(values.items())}
    return f"pgchange://{quote(server, safe='')}/{feed.kind}?{urlencode(query)}"


def from_uri(uri: str) -> tuple[Watched, str]:
    """Return the feed and the connection's name in a URI that ``to_uri`` wrote, without the conditions. Raises
    InvalidArgument for any other URI."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InvalidArgument(f"{uri!r} is not the URI of a feed: {error}") from error
    try:
        values = {key: json.loads(value) for key, value in parse_qsl(parts.query)}
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{uri!r}: its fields are not JSON: {error}") from error
    feed = {key: value for key, value in values.items() if key not in CONDITIONS}
    return from_json({"kind": parts.path.strip("/"), **feed}), unquote(parts.netloc)
