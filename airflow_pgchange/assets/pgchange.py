"""A feed as an asset: DAGs are scheduled on it, and it brings its own watcher."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlunsplit

from airflow.sdk import Asset, AssetWatcher

from airflow_pgchange.feeds.checks import Seconds
from airflow_pgchange.feeds.commit_queue import CommitFeed
from airflow_pgchange.feeds.feed import Watched, from_uri, is_prefix, to_uri
from airflow_pgchange.feeds.names import prefix_of
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.triggers.feed import POLL_INTERVAL, FeedTrigger
from airflow_pgchange.utils.arguments import FeedLike, Number, watched_of

if TYPE_CHECKING:
    from openlineage.client.event_v2 import Dataset

log = logging.getLogger(__name__)

_given: dict[str, tuple[str, dict[str, Any]]] = {}
"""The assets that this process has made, by name: the URI, and what the watcher's trigger was given."""


def feed_asset(
    feed: FeedLike,
    postgres_conn_id: str = PgChangeHook.default_conn_name,
    source_conn_id: str | None = None,
    *,
    min_changes: Number = 1,
    max_age: Seconds | None = None,
    poll_interval: Seconds = POLL_INTERVAL,
    max_lag: Seconds | None = None,
    max_backlog: Number | None = None,
    name: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Asset:
    """An asset that is updated when the feed has changes that nobody works on.

    ``postgres_conn_id`` holds the consumer's progress, ``source_conn_id`` the changes (default: the same). An
    update comes when ``min_changes`` are ready or the oldest ready one waits for ``max_age``,
    whichever is first. It is a wake-up, not a batch: the task takes its batch from PostgreSQL. One asset for
    a feed and its conditions: DAGs that share a consumer share its changes, and each wakes by its own conditions.
    Conditions that are not the defaults are in the URI of the asset, and in its name unless ``name`` is given.
    ``poll_interval`` is in neither: Airflow keeps one watcher for an asset, so all DAGs must give the same one.

    ``max_lag`` and ``max_backlog`` say how far behind the consumer may be before ``airflow-pgchange health`` reports it.
    They are the age of its oldest ready change (default: an hour), and the number of its changes (default: any). They too
    are in neither the name nor the URI. They hold as long as the watcher gives them. If the asset is gone, they hold
    until maintenance forgets its watcher, after seven days.
    """
    feed = watched_of(feed)
    trigger = FeedTrigger(
        feed,
        postgres_conn_id,
        source_conn_id,
        min_changes=min_changes,
        max_age=max_age,
        poll_interval=poll_interval,
        max_lag=max_lag,
        max_backlog=max_backlog,
    )
    name = name or f"{postgres_conn_id}/{_called(feed)}{_told(trigger.conditions)}"
    asset = Asset(
        name=name,
        uri=to_uri(feed, postgres_conn_id, trigger.conditions),
        group="pgchange",
        extra=dict(extra or {}),
        watchers=[AssetWatcher(name=name, trigger=trigger)],
    )
    _warn_of_clash(asset.name, asset.uri, trigger)
    return asset


def _told(conditions: Mapping[str, Any]) -> str:
    """The end of an asset's name that says when it is updated: nothing by default."""
    if not conditions:
        return ""
    return " ({})".format(", ".join(f"{name}={json.dumps(value)}" for name, value in conditions.items()))


def _warn_of_clash(name: str, uri: str, trigger: FeedTrigger) -> None:
    """Warn if this process, such as that which parses a DAG file, has given an asset of the name another watcher."""
    now = (uri, trigger.serialize()[1])
    before = _given.get(name, now)
    _given[name] = now
    if before != now:
        log.warning(
            "asset %r cannot have two watchers, %s and %s: Airflow would keep none of them; give each its own name, or "
            "the same conditions, poll_interval and limits to both",
            name,
            *(json.dumps(kwargs) for _, kwargs in (before, now)),
        )


def _called(feed: Watched) -> str:
    """The name of the feed, of a commit queue without its prefix: assets were called so before it had one. A consumer
    keeps the prefix if its name would be that of another kind without it."""
    bare = feed.name.removeprefix(CommitFeed.names.prefix)
    if not isinstance(feed, CommitFeed) or is_prefix(prefix_of(bare)):
        return feed.name
    return bare


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Check an asset URI ``pgchange://<connection>/<kind>?<fields as JSON>``; raises ValueError with the
    reason.
    """
    if not uri.netloc:
        raise ValueError(
            "a pgchange:// URI names a connection: pgchange://<connection>/<kind of feed>?<fields>"
        )
    from_uri(urlunsplit(uri))
    return uri


def to_openlineage(asset: Asset, lineage_context: object) -> Dataset:
    """What an asset of a feed is to OpenLineage: in the namespace ``pgchange://<connection>``, the name of the feed."""
    from airflow_pgchange.utils import openlineage  # noqa: PLC0415

    return openlineage.dataset_of(*from_uri(asset.uri))
