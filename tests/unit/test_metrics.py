"""The metrics that this package reports to Airflow."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.utils import metrics
from airflow_pgchange.utils.compat import Stats

LAG = Lag(ready=7, waiting=2, ready_age=1.5, faults=1)


class Recorder:
    """A metrics backend that records its calls."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, Any]] = {}

    def gauge(self, stat: str, value: Any, tags: Any = None, **_: object) -> None:
        self.seen[stat] = value, tags

    timing = gauge

    def incr(self, stat: str, count: int = 1, tags: Any = None, **_: object) -> None:
        self.gauge(stat, count, tags)

    def value(self, stat: str) -> Any:
        return self.seen[stat][0]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(metrics, "Stats", recorder)
    return recorder


def test_metrics_go_where_airflow_is_configured_to_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    if hasattr(Stats, "initialize"):
        factories = "airflow.sdk.observability.metrics.stats_utils.get_stats_factory"
        monkeypatch.setattr(factories, lambda: lambda: recorder)
    else:
        # Before Airflow 3.2 Stats creates its backend at its first use.
        monkeypatch.setattr(type(Stats), "factory", staticmethod(lambda: recorder))
        monkeypatch.setattr(Stats, "instance", None)
    metrics._prepare.cache_clear()
    metrics.report_lag("commits:delays/0", LAG)
    metrics._prepare.cache_clear()
    assert recorder.value("pgchange.ready") == 7


def test_lag_is_reported_under_the_name_of_its_feed(backend: Recorder) -> None:
    metrics.report_lag("commits:delays/0", LAG)
    assert backend.seen["pgchange.ready"] == (7, {"feed": "commits:delays/0"})


def test_ages_waiting_changes_and_faults_are_reported(backend: Recorder) -> None:
    metrics.report_lag("commits:delays/0", LAG)
    names = ("waiting", "ready_age", "waiting_age", "faults")
    assert [backend.value(f"pgchange.{name}") for name in names] == [2, 1.5, 0.0, 1]


def test_a_batch_is_counted_and_timed(backend: Recorder) -> None:
    metrics.report_batch("commits:delays/0", 5, 2.0, {"claim": 0.5})
    names = ("batches", "changes", "batch_seconds")
    assert [backend.value(f"pgchange.{name}") for name in names] == [1, 5, 2000.0]
    assert backend.seen["pgchange.phase_seconds"] == (500.0, {"feed": "commits:delays/0", "phase": "claim"})


def test_a_meter_reports_now_and_then(backend: Recorder) -> None:
    meter = metrics.Meter("commits:delays/0")
    meter.lag(LAG, 0.0)
    backend.seen.clear()
    meter.lag(LAG, metrics.EVERY - 0.1)
    assert backend.seen == {}
    meter.lag(LAG, metrics.EVERY)
    assert backend.value("pgchange.ready") == 7


def test_a_watcher_that_cannot_look_is_reported_until_it_can(backend: Recorder) -> None:
    meter, seen = metrics.Meter("commits:delays/0"), []
    for look in (lambda: meter.lag(LAG, 0.0), meter.blind, lambda: meter.lag(LAG, 1.0)):
        look()
        seen.append(backend.seen["pgchange.blind"])
    assert seen == [(value, {"feed": "commits:delays/0"}) for value in (0, 1, 0)]


def test_a_watcher_that_could_look_has_nothing_to_take_back(backend: Recorder) -> None:
    metrics.Meter("commits:delays/0").given_up()
    assert backend.seen == {}
