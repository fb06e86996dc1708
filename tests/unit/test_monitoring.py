"""The alert rules and the dashboard of the package, compared with the metrics that exist."""

from __future__ import annotations

import inspect
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.jobs import triggerer_job_runner

from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.utils import metrics
from tests.readme import blocks, in_code, table

MONITORING = files("airflow_pgchange") / "monitoring"
METRICS = Path(__file__).parents[2] / "docs/reference/metrics.md"
GUIDE = "docs/how-to/monitoring.md"
GAUGE, COUNTER, TIMER = "gauge", "counter", "timer"
SUFFIXES = {GAUGE: ("",), COUNTER: ("", "_total"), TIMER: ("_sum", "_count")}
"""The suffixes that statsd_exporter and OpenTelemetry add to the name of a metric of each kind."""


HISTOGRAM = ("_sum", "_count", "_bucket")
"""The suffixes of a timer that a mapping of statsd_exporter makes a histogram."""


class Kinds(dict[str, str]):
    """A metrics backend that records the kind and the tags of each metric."""

    tags: dict[str, set[str]]

    def __init__(self) -> None:
        super().__init__()
        self.tags = {}

    def _note(self, stat: str, kind: str, tags: dict[str, str]) -> None:
        self[stat], self.tags[stat] = kind, set(tags)

    def gauge(self, stat: str, value: Any, tags: Any = None, **_: object) -> None:
        self._note(stat, GAUGE, tags)

    def timing(self, stat: str, value: Any, tags: Any = None, **_: object) -> None:
        self._note(stat, TIMER, tags)

    def incr(self, stat: str, count: int = 1, tags: Any = None, **_: object) -> None:
        self._note(stat, COUNTER, tags)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Kinds:
    """Every metric that this package reports."""
    kinds = Kinds()
    monkeypatch.setattr(metrics, "Stats", kinds)
    metrics.report_lag("commits:delays/0", Lag(ready=1, waiting=0))
    metrics.report_sight("commits:delays/0", blind=True)
    metrics.report_batch("commits:delays/0", 1, 1.0, {"claim": 1.0})
    return kinds


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())
    return found


def expressions() -> list[str]:
    """Every query of the rules and of the dashboard."""
    shown = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    asked = [one["query"]["query"] for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    return [rule["expr"] for rule in rules()] + shown + asked


def named(text: str) -> set[str]:
    return set(re.findall(r"airflow_pgchange_\w+", text))


def names(reported: Kinds) -> dict[str, str]:
    """The metric behind each name in Prometheus."""
    return {
        f"airflow_{stat.replace('.', '_')}{suffix}": stat
        for stat, kind in reported.items()
        for suffix in SUFFIXES[kind]
    }


def test_rules_and_dashboard_ask_for_metrics_that_are_reported_and_for_each_of_them(reported: Kinds) -> None:
    known = names(reported)
    asked = set().union(*map(named, expressions()))
    assert asked - known.keys() == set()
    assert {known[name] for name in asked} == set(reported)


def test_rules_and_dashboard_use_labels_that_are_reported(reported: Kinds) -> None:
    for text in expressions():
        labels = set(re.findall(r"(\w+)(?==~|!~|!=|=\")", text))
        for inside in re.findall(r"(?:by|on) \(([\w, ]+)\)", text):
            labels |= set(inside.split(", "))
        for name in named(text):
            stat = re.sub("_(total|sum|count)$", "", name).replace("airflow_pgchange_", "pgchange.")
            assert labels <= reported.tags[stat], text


def test_the_page_of_metrics_lists_those_that_are_reported_with_their_kinds(reported: Kinds) -> None:
    listed = {
        f"pgchange.{name}": kind
        for names, kind in re.findall(r"^\| (`.*?) \| (\w+) \|", METRICS.read_text(), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
        if kind in SUFFIXES
    }
    assert listed == dict(reported)


def test_the_guide_maps_metrics_that_are_reported_and_asks_for_them_and_for_airflows(reported: Kinds) -> None:
    mappings, rules = (next(iter(yaml.safe_load(block).values())) for block in blocks("yaml", GUIDE))
    known = set(names(reported))
    for mapping in mappings:
        stat = mapping["match"].removeprefix("airflow.")
        assert mapping["name"] == mapping["match"].replace(".", "_")
        assert mapping["match_metric_type"] == {GAUGE: "gauge", TIMER: "observer"}[reported[stat]]
        if mapping.get("observer_type") == "histogram":
            known |= {mapping["name"] + suffix for suffix in HISTOGRAM}
    queries = [rule["expr"] for group in rules for rule in group["rules"]]
    queries += [in_code(row[1])[0] for row in table(GUIDE, "### More rules")]
    asked = set(re.findall(r"\bairflow_\w+", " ".join(queries)))
    ours = {name for name in asked if name.startswith("airflow_pgchange_")}
    assert ours - known == set()
    assert {name.removeprefix("airflow_") for name in asked - ours} == {"triggerer_heartbeat"}
    assert '"triggerer_heartbeat"' in inspect.getsource(triggerer_job_runner)


def test_each_alert_says_whom_it_is_about_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules()) > 0
    for rule in rules():
        assert "{{ $labels.feed }}" in rule["annotations"]["summary"]
        assert "`airflow-pgchange " in rule["annotations"]["description"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["alert"] in METRICS.read_text()


def test_the_panels_of_the_dashboard_cover_each_other_nowhere() -> None:
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
