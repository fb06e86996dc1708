"""Check the arguments of operators and sensors: when the DAG is parsed, and again after templates are rendered."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import feed_kinds
from airflow_pgchange.feeds.argument_checks import OnBusy, OnGiveUp, check_word, seconds, size, time_of, until
from airflow_pgchange.feeds.feed import Feed, Watched
from airflow_pgchange.lake.tables import CLASSES, Iceberg
from airflow_pgchange.utils.compat import RetryPolicy, with_retry_policy
from airflow_pgchange.utils.retry_policy import UnlessPermanent

FeedLike = Watched | Mapping[str, Any] | str
"""A feed, its JSON as a mapping or as text, or its asset URI."""

Number = float | str
"""A whole number, also as text or as a float such as 20000.0, which forms of Airflow produce."""

Check = Callable[[str, Any], Any]
"""A check of an argument, by its name and value: returns the value to use, or raises InvalidArgument with the name."""

TEMPLATES = ("{{", "{%")


class CheckedArguments:
    """The base of operators and sensors that check their arguments.

    ``arguments`` has a check for each argument that can be templated. A literal value is checked when the task is made.
    The value of a template or of another task is checked before the task runs. The result of the check replaces the
    value. Unless the task has its own ``retry_policy``, Airflow does not retry it after a permanent error.
    """

    arguments: ClassVar[Mapping[str, Check]] = {}

    retry_policy: RetryPolicy | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        with_retry_policy(cls)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.retry_policy is None:
            self.retry_policy = UnlessPermanent()

    def __setattr__(self, name: str, value: Any) -> None:
        # Airflow assigns rendered values too, so this checks them as well.
        check = self.arguments.get(name)
        super().__setattr__(name, value if check is None or is_template(value) else check(name, value))

    def pre_execute(self, context: Any) -> None:
        """Check all arguments. Now every value is rendered, even if it still looks like a template."""
        for name, check in self.arguments.items():
            super().__setattr__(name, check(name, getattr(self, name)))
        super().pre_execute(context)  # type: ignore[misc]


def is_template(value: Any) -> bool:
    """Whether a value is or contains a template or a result of another task, which is known only when the task runs."""
    if isinstance(value, str):
        return any(mark in value for mark in TEMPLATES)
    if isinstance(value, Mapping | list | tuple):
        return any(map(is_template, value.values() if isinstance(value, Mapping) else value))
    return hasattr(value, "resolve")


def maybe(check: Check) -> Check:
    """Return a check that also accepts None, or the empty text that a template renders for None."""
    return lambda name, value: None if value is None or value == "" else check(name, value)


def one_of(words: Any) -> Check:
    """Return a check that accepts the words of a ``Literal``."""

    def check(name: str, value: Any) -> Any:
        check_word(name, value, words)
        return value

    return check


def anything(name: str, value: Any) -> Any:
    """Accept any value. The operator checks it when it uses it."""
    return value


def text(name: str, value: Any) -> str:
    """Accept a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name} must be a text that is not empty, not {value!r:.300}")
    return value


def function(name: str, value: Any) -> Any:
    """Accept a callable, but not the name of a callable."""
    if not callable(value):
        raise InvalidArgument(
            f"{name} must be a function, not {value!r:.300} of type {type(value).__name__}: import the function, and "
            f"give it without quotes and without calling it, as in {name}=keep"
        )
    return value


def count(name: str, value: Any) -> int:
    """Accept a whole number from 1 on."""
    number = whole(name, value)
    if number < 1:
        raise InvalidArgument(f"{name} must be a number from 1 to {2**31 - 1}, not {value!r:.300}")
    return number


def whole(name: str, value: Any) -> int:
    """Accept a whole number in the range of PostgreSQL's type integer."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not number.is_integer() or not -(2**31) <= number < 2**31:
        raise InvalidArgument(
            f"{name} must be a whole number from {-(2**31)} to {2**31 - 1}, not {value!r:.300}"
        )
    return int(number)


def names(name: str, value: Any) -> list[str]:
    """Accept a list of names, or a text of names separated by commas; at least one name."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    candidates = list(parts) if isinstance(parts, list | tuple | set | frozenset) else []
    if not all(isinstance(candidate, str) for candidate in candidates):
        raise InvalidArgument(f"{name} must be names, not {value!r:.300}")
    result = [candidate for candidate in candidates if candidate.strip()]
    if not result:
        raise InvalidArgument(f"{name}: name at least one, not {value!r:.300}")
    return result


def columns(name: str, value: Any) -> str | list[str]:
    """Accept the name of a column, or a list of names."""
    return text(name, value) if isinstance(value, str) else names(name, value)


def flag(name: str, value: Any) -> bool:
    """Accept True or False, also as text, which a template renders."""
    if str(value).lower() not in ("true", "false"):
        raise InvalidArgument(f"{name} must be True or False, not {value!r:.300}")
    return str(value).lower() == "true"


def lake_table(name: str, value: Any) -> Mapping[str, Any]:
    """Accept a table of a lake, and return it as a mapping, which Airflow can render, show and store.

    A text is the catalog and the table of an ``Iceberg``, as in ``lake.sales.payment``.
    """
    if isinstance(value, str) and value.count(".") > 1:
        catalog, _, table = value.partition(".")
        value = Iceberg(table, catalog)
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if not isinstance(value, Mapping) or value.get("kind") not in CLASSES:
        raise InvalidArgument(
            f"{name} must be a table of a lake, such as Iceberg('sales.payment', catalog='lake'), or the text "
            f"'lake.sales.payment', not {value!r:.300}"
        )
    return value


def texts(name: str, value: Any) -> Mapping[str, str | None]:
    """Accept a mapping from names to texts or None."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(
            f"{name} must be a mapping from names to texts, not {value!r:.300}: use render_template_as_native_obj if "
            "a template renders it"
        )
    return value


def feed(name: str, value: Any) -> Mapping[str, Any]:
    """Accept a feed, and return it as a mapping, which Airflow can render, show and store."""
    return feed_kinds.to_json(feed_of(value))


def watched(name: str, value: Any) -> Mapping[str, Any]:
    """Accept a feed, or a feed that stands for several consumers, and return it as a mapping."""
    return feed_kinds.to_json(watched_of(value))


CHECKS: Mapping[str, Check] = {
    "feed": feed,
    "postgres_conn_id": text,
    "source_conn_id": maybe(text),
    "limit": count,
    "max_batches": maybe(count),
    "max_attempts": maybe(count),
    "min_changes": count,
    "chunk_size": count,
    "read_ahead": count,
    "width": count,
    "ahead": count,
    "handle": text,
    "lease": seconds,
    "on_busy": one_of(OnBusy),
    "on_give_up": one_of(OnGiveUp),
    "timeout": seconds,
    "busy_timeout": maybe(seconds),
    "idle_timeout": maybe(seconds),
    "backfill_timeout": seconds,
    "poll_interval": seconds,
    "pause": seconds,
    "delay": maybe(seconds),
    "expiry": maybe(seconds),
    "retention": maybe(seconds),
    "retention_bytes": maybe(size),
    "retention_count": maybe(count),
    "saga_retention": maybe(seconds),
    "snapshot_retention": maybe(seconds),
    "letter_retention": maybe(seconds),
    "older_than": maybe(seconds),
    "max_age": maybe(seconds),
    "until": until,
    "since": time_of,
    "key": maybe(text),
    "order_col": maybe(text),
    "shard": maybe(whole),
    "workers": maybe(whole),
    "tube": text,
    "tables": names,
    "op": text,
    "query": text,
    "predicate": anything,
    "queue_name": text,
    "reply_queue": maybe(text),
    "data": texts,
    "properties": maybe(texts),
    "after": maybe(names),
    "queues": maybe(names),
    "group": text,
    "subscription_id": maybe(text),
    "consumer": maybe(text),
    "systems": maybe(names),
    "without": maybe(names),
}
"""The check of each argument name. An argument has the same check in every operator and sensor."""


def checks(*words: str, **own: Check) -> dict[str, Check]:
    """Return the checks of arguments: of ``words`` from ``CHECKS``, and ``own`` checks of the operator."""
    return {**{word: CHECKS[word] for word in words}, **own}


def feed_of(value: FeedLike) -> Feed:
    """Return the feed that an argument names. Raises InvalidArgument if it names none, or several consumers."""
    result = watched_of(value)
    if not isinstance(result, Feed):
        raise InvalidArgument(
            f"{result.name} can be waited for, but gives no batches: name the feed of one worker"
        )
    return result


def watched_of(value: FeedLike) -> Watched:
    """Return the feed that an argument names, which may stand for several consumers. Raises InvalidArgument if it names
    none."""
    if isinstance(value, Watched):
        return value
    if isinstance(value, str):
        if value.startswith("pgchange://"):
            return feed_kinds.from_uri(value)[0]
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidArgument(
                f"{value!r} is not a feed: give a feed, its JSON or its asset URI"
            ) from error
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{value!r} is not a feed: give a feed, its JSON or its asset URI")
    return feed_kinds.from_json(
        {key: _plain(item) if key in _not_text(value) else item for key, item in value.items()}
    )


def _not_text(data: Mapping[str, Any]) -> set[str]:
    kind = feed_kinds.kinds().get(str(data.get("kind")))
    annotations = {} if kind is None else kind.__annotations__
    return {name for name, annotation in annotations.items() if annotation in ("int", "bool", "float")}


def _plain(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    try:
        return json.loads(item.lower())
    except json.JSONDecodeError:
        return item
