"""Gauges and counters of feeds, through Airflow's metrics.

``pgchange.ready``, ``pgchange.waiting``, ``pgchange.ready_age``, ``pgchange.waiting_age`` (seconds) and
``pgchange.faults`` are gauges; ``pgchange.batches`` and ``pgchange.changes`` count what was processed, and
``pgchange.batch_seconds`` times it. Each carries the feed's name as the tag ``feed``, and is sent a second
time with the name as its last part where ``[metrics] legacy_names_on`` is set, for backends without tags.
"""

from __future__ import annotations

from functools import cache

from airflow.sdk import conf
from airflow.sdk.observability import stats
from airflow.sdk.observability.metrics.stats_utils import get_stats_factory

from airflow_pgchange.feeds.batch import Lag

EVERY = 10.0
"""Seconds between two reports of the same feed's lag."""


class Meter:
    """Reports the lag of one feed, not more often than every ``EVERY`` seconds of the caller's clock."""

    def __init__(self, feed: str) -> None:
        self._feed = feed
        self._next = float("-inf")

    def lag(self, lag: Lag, now: float) -> None:
        if now < self._next:
            return
        self._next = now + EVERY
        report_lag(self._feed, lag)


def are_on() -> bool:
    """Whether anybody collects metrics; asking for a lag only to report it is worth nothing otherwise."""
    switches = ("statsd_on", "statsd_datadog_enabled", "otel_on")
    return any(conf.getboolean("metrics", switch, fallback=False) for switch in switches)


def report_lag(feed: str, lag: Lag) -> None:
    """Set the gauges of one feed."""
    gauges = {
        "ready": lag.ready,
        "waiting": lag.waiting,
        "ready_age": lag.ready_age or 0.0,
        "waiting_age": lag.waiting_age or 0.0,
        "faults": lag.faults,
    }
    for name, value in gauges.items():
        for stat, tags in _names(name, feed):
            stats.gauge(stat, value, tags=tags)


def report_batch(feed: str, changes: int, seconds: float) -> None:
    """Count one batch that was processed and committed."""
    for stat, tags in _names("batches", feed):
        stats.incr(stat, 1, tags=tags)
    for stat, tags in _names("changes", feed):
        stats.incr(stat, changes, tags=tags)
    for stat, tags in _names("batch_seconds", feed):
        stats.timing(stat, 1000.0 * seconds, tags=tags)


def _names(name: str, feed: str) -> list[tuple[str, dict[str, str]]]:
    names = [(f"pgchange.{name}", {"feed": feed})]
    if _prepare():
        names.append((f"pgchange.{name}.{stats.normalize_name_for_stats(feed, log_warning=False)}", {}))
    return names


@cache
def _prepare() -> bool:
    """Once a process. The triggerer prepares its own metrics and not the SDK's, which are a module of their
    own.
    """
    by_name = conf.getboolean("metrics", "legacy_names_on", fallback=True)
    stats.initialize(factory=get_stats_factory(), export_legacy_names=by_name)
    return by_name
