"""Find the assets to which DAGs give watchers of feeds, and those to which they give different watchers.

Each time that Airflow parses a DAG file, it replaces the watcher that another file has given the asset. Then it loses
both until it parses one of the files again. So most of the time the asset has no watcher, and no DAG wakes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.utils.arguments import watched_of

TRIGGER = "airflow_pgchange.triggers.feed.FeedTrigger"
SHOWN = (
    "postgres_conn_id",
    "source_conn_id",
    "min_changes",
    "max_age",
    "poll_interval",
    "max_lag",
    "max_backlog",
)
"""The arguments by which watchers of one feed may differ."""
SAME_EVERYWHERE = {"source_conn_id", "poll_interval", "max_lag", "max_backlog"}
"""The arguments among them that are not in the URI of the asset."""


@dataclass(frozen=True)
class WatchedAsset:
    """An asset with a watcher, from a DAG. ``arguments_json`` has the arguments of the watcher's trigger, as JSON."""

    name: str
    uri: str
    feed: Watched
    arguments_json: str

    @property
    def arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = json.loads(self.arguments_json)
        return arguments


@dataclass(frozen=True)
class Clash:
    """An asset to which DAGs give different watchers: each watcher, with the ids of its DAGs."""

    name: str
    watchers: Mapping[WatchedAsset, frozenset[str]]

    @property
    def dags(self) -> set[str]:
        return {dag_id for dags in self.watchers.values() for dag_id in dags}

    def is_of(self, connection: str, feed: Watched | None = None) -> bool:
        """Whether a watcher keeps its progress at this connection and, if ``feed`` is given, watches that feed."""
        return any(
            watcher.arguments.get("postgres_conn_id") == connection and feed in (None, watcher.feed)
            for watcher in self.watchers
        )

    def description(self, readable: Iterable[str] | None = None) -> str:
        """Return the problem and its fix as text. Only DAGs in ``readable`` are named; None: all."""
        shown = self.dags if readable is None else self.dags & set(readable)
        differ = self._differ()
        each = "; ".join(
            sorted(_description(watcher, differ, dags & shown) for watcher, dags in self.watchers.items())
        )
        mend = "leave out its name, or give each of these a name of its own"
        if set(differ) <= SAME_EVERYWHERE:
            mend = f"give it the same {' and '.join(differ)} everywhere"
        return (
            f"DAGs give asset {self.name!r} different watchers, and Airflow can keep only one: {each}; {mend}"
        )

    def _differ(self) -> list[str]:
        """Return the names of the arguments in which the watchers differ."""
        all_arguments = [watcher.arguments for watcher in self.watchers]
        differ = [name for name in SHOWN if len({json.dumps(each.get(name)) for each in all_arguments}) > 1]
        return differ if len({watcher.feed for watcher in self.watchers}) == 1 else ["feed", *differ]


def _description(watcher: WatchedAsset, differ: list[str], dags: Iterable[str]) -> str:
    arguments = {**watcher.arguments, "feed": watcher.feed.name}
    by = ", ".join(sorted(dags)) or "another DAG"
    return f"{', '.join(f'{name}={arguments.get(name)!r}' for name in differ)} by {by}"


def clashes(watched: Mapping[str, Iterable[WatchedAsset]]) -> list[Clash]:
    """Return the assets to which DAGs give different watchers, in the order of their names.

    ``given`` has the assets of each DAG by its id.
    """
    by_name: dict[str, dict[WatchedAsset, set[str]]] = defaultdict(lambda: defaultdict(set))
    for dag_id, assets in watched.items():
        for asset in assets:
            by_name[asset.name][asset].add(dag_id)
    return [
        Clash(name, {watcher: frozenset(dags) for watcher, dags in watchers.items()})
        for name, watchers in sorted(by_name.items())
        if len(watchers) > 1
    ]


def watched_assets(node: Any) -> Iterator[WatchedAsset]:
    """Yield the assets of a serialized DAG, or of a part of it, that have a single watcher, which watches a feed."""
    if isinstance(node, Mapping):
        watchers = node.get("watchers")
        if isinstance(watchers, list) and len(watchers) == 1 and "uri" in node:
            with suppress(PgChangeError, TypeError, KeyError):
                yield from _of_feed(node, watchers[0]["trigger"])
        for value in node.values():
            yield from watched_assets(value)
    elif isinstance(node, list):
        for value in node:
            yield from watched_assets(value)


def _of_feed(asset: Mapping[str, Any], trigger: Mapping[str, Any]) -> Iterator[WatchedAsset]:
    if trigger["classpath"] == TRIGGER:
        arguments = unwrapped(trigger["kwargs"])
        feed = watched_of(arguments.pop("feed"))
        yield WatchedAsset(asset["name"], asset["uri"], feed, json.dumps(arguments, sort_keys=True))


def unwrapped(value: Any) -> Any:
    """Return a value as it was before Airflow serialized it."""
    if isinstance(value, Mapping) and value.keys() == {"__var", "__type"}:
        return unwrapped(value["__var"])
    if isinstance(value, Mapping):
        return {key: unwrapped(item) for key, item in value.items()}
    return [unwrapped(item) for item in value] if isinstance(value, list) else value
