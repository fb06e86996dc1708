"""When a trigger records for people what it has observed, on a simulated clock."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.triggers import observations
from airflow_pgchange.triggers.observations import RECORD_EVERY, Observation, Observations, record

FEED = CommitFeed("delays", 0)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connection on which every write fails."""

    async def ask_all(*_: object) -> list[Any]:
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(observations, "ask_all", ask_all)


def noted(woke_at: float | None) -> Observations:
    """Return the observations of a trigger that recorded at second 10, and that woke somebody at ``woke_at``, if at
    all."""
    return Observations(Observation(ready=1), woke_at, Observation(ready=0), 10.0)


def test_that_somebody_was_woken_is_noted_at_once() -> None:
    assert noted(10.1).is_due(10.1)


def test_unchanged_observations_are_recorded_at_intervals() -> None:
    assert [noted(None).is_due(10.0 + later) for later in (0.1, RECORD_EVERY)] == [False, True]


async def test_a_wake_up_that_could_not_be_written_is_noted_later(lost: Any) -> None:
    watcher = noted(10.1)
    with pytest.raises(psycopg.OperationalError):
        await record(lost, {FEED: watcher}, 11.0)
    assert watcher.woke_at == 10.1
    assert [watcher.is_due(11.0 + later) for later in (0.1, RECORD_EVERY)] == [False, True]
