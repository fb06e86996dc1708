"""A feed as an asset with its own watcher, so that DAGs can be scheduled on it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlunsplit

from airflow.sdk import Asset, AssetWatcher

from airflow_pgchange.feeds.argument_checks import Seconds
from airflow_pgchange.feeds.commit_queue import CommitFeed
from airflow_pgchange.feeds.consumer_names import prefix_of
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.feeds.feed_kinds import from_uri, is_prefix, to_uri
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.triggers.feed import POLL_INTERVAL, FeedTrigger
from airflow_pgchange.utils.arguments import FeedLike, Number, watched_of

if TYPE_CHECKING:
    from openlineage.client.event_v2 import Dataset

log = logging.getLogger(__name__)

_watched: dict[str, tuple[str, dict[str, Any]]] = {}
"""The assets that this process has made, by name: the URI, and the arguments of the watcher's trigger."""


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
    """Return an asset that is updated when the feed has ready changes and no consumer is at work on them.

    ``postgres_conn_id`` holds the consumer's progress, ``source_conn_id`` the changes (default: the same). The asset is
    updated when ``min_changes`` changes are ready, or when the oldest ready change is ``max_age`` old. An update is a
    wake-up, not a batch: the task claims its batch from PostgreSQL.

    There is an asset for each combination of feed and conditions. DAGs that share a consumer share its changes, and each
    wakes by its own conditions. Conditions that differ from the defaults are in the URI of the asset, and in its name
    unless ``name`` is given. ``poll_interval`` is in neither. Airflow keeps a single watcher for an asset, so all DAGs
    must give the same ``poll_interval``.

    ``max_lag`` and ``max_backlog`` say how far behind the consumer may be before ``airflow-pgchange health`` reports it.
    They are the age of its oldest ready change (default: an hour), and the number of its changes (default: any). They too
    are in neither the name nor the URI. They apply as long as the watcher sets them. If the asset is removed, they apply
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
    name = name or f"{postgres_conn_id}/{_feed_name(feed)}{_suffix(trigger.conditions)}"
    asset = Asset(
        name=name,
        uri=to_uri(feed, postgres_conn_id, trigger.conditions),
        group="pgchange",
        extra=dict(extra or {}),
        watchers=[AssetWatcher(name=name, trigger=trigger)],
    )
    _warn_of_clash(asset.name, asset.uri, trigger)
    return asset


def _suffix(conditions: Mapping[str, Any]) -> str:
    """Return the suffix of an asset's name that shows its conditions, such as `` (min_changes=5)``. Empty for
    defaults."""
    if not conditions:
        return ""
    return " ({})".format(", ".join(f"{name}={json.dumps(value)}" for name, value in conditions.items()))


def _warn_of_clash(name: str, uri: str, trigger: FeedTrigger) -> None:
    """Warn if this process, for example while it parses a DAG file, has made an asset of this name with a different
    watcher."""
    now = (uri, trigger.serialize()[1])
    before = _watched.get(name, now)
    _watched[name] = now
    if before != now:
        log.warning(
            "asset %r cannot have two watchers, %s and %s: Airflow would keep neither. Give each asset its own name, or "
            "give both the same conditions, poll_interval and limits",
            name,
            *(json.dumps(kwargs) for _, kwargs in (before, now)),
        )


def _feed_name(feed: Watched) -> str:
    """Return the name of the feed in the name of its asset.

    A commit queue's prefix is left out, because existing assets have names from before the prefix was introduced. The
    prefix stays if the rest would begin with the prefix of another kind.
    """
    bare = feed.name.removeprefix(CommitFeed.names.prefix)
    if not isinstance(feed, CommitFeed) or is_prefix(prefix_of(bare)):
        return feed.name
    return bare


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Check an asset URI ``pgchange://<connection>/<kind>?<fields as JSON>``. Raises ValueError if it is invalid."""
    if not uri.netloc:
        raise ValueError(
            "a pgchange:// URI names a connection: pgchange://<connection>/<kind of feed>?<fields>"
        )
    from_uri(urlunsplit(uri))
    return uri


def to_openlineage(asset: Asset, lineage_context: object) -> Dataset:
    """Return the OpenLineage dataset of a feed's asset: the feed's name in the namespace ``pgchange://<connection>``."""
    from airflow_pgchange.utils import openlineage  # noqa: PLC0415

    return openlineage.dataset_of(*from_uri(asset.uri))
