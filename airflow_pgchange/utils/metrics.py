"""Gauges and counters of feeds, through Airflow's metrics.

Gauges: ``pgchange.ready``, ``pgchange.waiting``, ``pgchange.ready_age`` and ``pgchange.waiting_age`` (seconds),
``pgchange.faults``, and ``pgchange.blind``. The last is 1 while the queries of a watcher fail, and otherwise 0.

Counters: ``pgchange.batches`` and ``pgchange.changes`` count the processed batches and changes.

Timers: ``pgchange.batch_seconds`` for a batch, and ``pgchange.phase_seconds`` for a phase, which is the tag ``phase``.

Each metric has the feed's name as the tag ``feed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from airflow.providers.common.compat.sdk import conf

from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.utils.compat import Stats, prepare_stats

EVERY = 10.0
"""Seconds between two reports of the same feed's lag."""


class Meter:
    """Reports the lag of one feed, not more often than every ``EVERY`` seconds of the caller's clock."""

    def __init__(self, feed: str) -> None:
        self._feed = feed
        self._next = float("-inf")
        self._blind = False

    def lag(self, lag: Lag, now: float) -> None:
        if now < self._next:
            return
        self._next = now + EVERY
        report_lag(self._feed, lag)
        self._report_blind(blind=False)

    def blind(self) -> None:
        """Report that the queries of the watcher fail. The next lag is then reported at once."""
        self._next = float("-inf")
        self._report_blind(blind=True)

    def given_up(self) -> None:
        """Set ``pgchange.blind`` to 0 because the watcher has left. A gauge would keep its last value for ever."""
        if self._blind:
            self._report_blind(blind=False)

    def _report_blind(self, *, blind: bool) -> None:
        self._blind = blind
        report_sight(self._feed, blind=blind)


def are_on() -> bool:
    """Whether Airflow sends metrics to a collector. If not, skip queries whose results are only reported."""
    switches = ("statsd_on", "statsd_datadog_enabled", "otel_on")
    return any(conf.getboolean("metrics", switch) for switch in switches)


def report_lag(feed: str, lag: Lag) -> None:
    """Set the gauges of a feed's lag."""
    gauges = {
        "ready": lag.ready,
        "waiting": lag.waiting,
        "ready_age": lag.ready_age or 0.0,
        "waiting_age": lag.waiting_age or 0.0,
        "faults": lag.faults,
    }
    _prepare()
    for name, value in gauges.items():
        Stats.gauge(f"pgchange.{name}", value, tags={"feed": feed})


def report_sight(feed: str, *, blind: bool) -> None:
    """Set the gauge ``pgchange.blind`` of a feed."""
    _prepare()
    Stats.gauge("pgchange.blind", int(blind), tags={"feed": feed})


def report_batch(feed: str, changes: int, seconds: float, phases: Mapping[str, float]) -> None:
    """Count a committed batch and its changes, and report its times in seconds."""
    _prepare()
    tags = {"feed": feed}
    Stats.incr("pgchange.batches", 1, tags=tags)
    Stats.incr("pgchange.changes", changes, tags=tags)
    Stats.timing("pgchange.batch_seconds", 1000.0 * seconds, tags=tags)
    for phase, took in phases.items():
        Stats.timing("pgchange.phase_seconds", 1000.0 * took, tags={**tags, "phase": phase})


@cache
def _prepare() -> None:
    """Connect ``Stats`` to its collector, once in a process. The triggerer connects only its own statistics."""
    prepare_stats()
