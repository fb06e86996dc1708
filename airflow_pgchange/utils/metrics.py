"""Gauges and counters of feeds, through Airflow's metrics.

``pgchange.ready``, ``pgchange.waiting``, ``pgchange.ready_age``, ``pgchange.waiting_age`` (seconds) and
``pgchange.faults`` are gauges, and so is ``pgchange.blind``, 1 while a watcher cannot look at the feed and 0 while it
can, and once it is gone; ``pgchange.batches`` and ``pgchange.changes`` count what was processed, and
``pgchange.batch_seconds`` times it, and ``pgchange.phase_seconds`` each phase of it, by the tag ``phase``. Each carries
the feed's name as the tag ``feed``.
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
        self._report_sight(blind=False)

    def blind(self) -> None:
        """It cannot be looked at; the next lag is reported at once."""
        self._next = float("-inf")
        self._report_sight(blind=True)

    def given_up(self) -> None:
        """Nobody looks any longer: a gauge keeps what it was set to last."""
        if self._blind:
            self._report_sight(blind=False)

    def _report_sight(self, *, blind: bool) -> None:
        self._blind = blind
        report_sight(self._feed, blind=blind)


def are_on() -> bool:
    """Whether anybody collects metrics; asking for a lag only to report it is worth nothing otherwise."""
    switches = ("statsd_on", "statsd_datadog_enabled", "otel_on")
    return any(conf.getboolean("metrics", switch) for switch in switches)


def report_lag(feed: str, lag: Lag) -> None:
    """Set the gauges of one feed."""
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
    """Set whether a watcher cannot look at one feed."""
    _prepare()
    Stats.gauge("pgchange.blind", int(blind), tags={"feed": feed})


def report_batch(feed: str, changes: int, seconds: float, phases: Mapping[str, float]) -> None:
    """Count one batch that was processed and committed."""
    _prepare()
    tags = {"feed": feed}
    Stats.incr("pgchange.batches", 1, tags=tags)
    Stats.incr("pgchange.changes", changes, tags=tags)
    Stats.timing("pgchange.batch_seconds", 1000.0 * seconds, tags=tags)
    for phase, took in phases.items():
        Stats.timing("pgchange.phase_seconds", 1000.0 * took, tags={**tags, "phase": phase})


@cache
def _prepare() -> None:
    """Connect ``Stats`` once a process: the triggerer connects its own statistics, but not those of the SDK."""
    prepare_stats()
