"""A feed as an asset: DAGs are scheduled on it, and it brings its own watcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlunsplit

from airflow.sdk import Asset, AssetWatcher

from airflow_pgchange.feeds.checks import Seconds
from airflow_pgchange.feeds.commit_queue import CommitFeed
from airflow_pgchange.feeds.feed import Watched, from_uri, is_prefix, to_uri
from airflow_pgchange.feeds.names import prefix_of
from airflow_pgchange.triggers.feed import POLL_INTERVAL, FeedTrigger
from airflow_pgchange.utils.arguments import FeedLike, Number, watched_of

if TYPE_CHECKING:
    from openlineage.client.event_v2 import Dataset


def feed_asset(
    feed: FeedLike,
    postgres_conn_id: str,
    source_conn_id: str | None = None,
    *,
    min_changes: Number = 1,
    max_age: Seconds | None = None,
    poll_interval: Seconds = POLL_INTERVAL,
    name: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Asset:
    """An asset that is updated when the feed has changes that nobody works on.

    ``postgres_conn_id`` holds the consumer's progress, ``source_conn_id`` the changes (default: the same). An
    update comes when ``min_changes`` are ready or the oldest ready one waits for ``max_age``,
    whichever is first. It is a wake-up, not a batch: the task takes its batch from PostgreSQL. One asset for
    a feed: DAGs that share a consumer share its changes.
    """
    feed = watched_of(feed)
    trigger = FeedTrigger(
        feed,
        postgres_conn_id,
        source_conn_id,
        min_changes=min_changes,
        max_age=max_age,
        poll_interval=poll_interval,
    )
    name = name or f"{postgres_conn_id}/{_called(feed)}"
    return Asset(
        name=name,
        uri=to_uri(feed, postgres_conn_id),
        group="pgchange",
        extra=dict(extra or {}),
        watchers=[AssetWatcher(name=name, trigger=trigger)],
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
