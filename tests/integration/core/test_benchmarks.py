"""Benchmarks are a check: if a figure misses its goal, the report says so and the run fails."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests.benchmarks import __main__ as benchmarks


@pytest.fixture
def without_a_cluster(bare_db, monkeypatch):
    """The planted benchmark reads nothing, so an empty database replaces a new cluster with our schemas."""
    cluster = SimpleNamespace(conninfo=lambda: bare_db, remove=lambda: None)
    monkeypatch.setattr(benchmarks, "Cluster", SimpleNamespace(create=lambda *_: cluster))
    monkeypatch.setattr(benchmarks, "schema", SimpleNamespace(install=lambda _: None))


@pytest.mark.usefixtures("without_a_cluster")
@pytest.mark.parametrize(
    ("figures", "code", "missed"),
    [
        ([(4.5, {"most": 4.5}), (0.55, {"least": 0.55}), (9, {})], 0, 0),
        ([(4.6, {"most": 4.5}), (4.4, {"most": 4.5})], 1, 1),
        ([(0.54, {"least": 0.55}), (4.6, {"most": 4.5})], 1, 2),
    ],
)
def test_a_goal_that_is_missed_fails_the_run(monkeypatch, capsys, figures, code, missed):
    def run(conninfo, report):
        for figure, goal in figures:
            report.say("speed", figure, "x", **goal)

    monkeypatch.setitem(sys.modules, "tests.benchmarks.planted", SimpleNamespace(run=run))
    assert benchmarks.main(["planted"]) == code
    assert capsys.readouterr().out.count("MISSED") == missed
