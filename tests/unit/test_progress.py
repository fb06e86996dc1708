"""The log lines about a batch while it is processed, and the durations of its phases."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_pgchange.feeds.attempt_phases import EVERY, Progress
from airflow_pgchange.spark import session
from airflow_pgchange.spark.progress_notes import Notes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "manifest.json")


def test_phases_are_told_in_their_order_and_the_last_until_now(progress: Progress, clock: Clock) -> None:
    for phase in ("claim", "process", "ack"):
        progress.begin(phase)  # type: ignore[arg-type]
        clock.now += 1
    assert list(progress.seconds.items()) == [("claim", 1), ("process", 1), ("ack", 1)]


def test_a_phase_that_is_gone_through_again_takes_longer(progress: Progress, clock: Clock) -> None:
    for phase in ("process", "ack", "process", "ack"):
        progress.begin(phase)  # type: ignore[arg-type]
        clock.now += 1
    assert progress.seconds == {"process": 2, "ack": 2}


def test_a_phase_may_have_begun_before_it_was_known(progress: Progress, clock: Clock) -> None:
    progress.begin("start")
    clock.now += 5
    progress.begin("process", since=clock.now - 2)
    assert progress.seconds == {"start": 3, "process": 2}


def test_nothing_is_said_of_what_is_over_soon(progress: Progress, clock: Clock) -> None:
    said: list[str] = []
    with progress.reported_to(said.append):
        progress.at("reading", "5 changes")
        clock.now += EVERY - 0.1
        progress.at("merging", "5 rows")
        progress.again()
    assert said == []


def test_a_step_that_lasts_is_said_now_and_then_and_a_new_one_at_once(
    progress: Progress, clock: Clock
) -> None:
    said: list[str] = []
    with progress.reported_to(said.append):
        progress.at("reading", "5 changes")
        clock.now += EVERY
        progress.again()
        progress.again()
        assert said == ["reading: 5 changes"]
        progress.at("merging", "5 rows")
        progress.at("merging", "6 rows")
        clock.now += EVERY
        progress.again()
    clock.now += EVERY
    progress.at("committing", "a batch")
    assert said == ["reading: 5 changes", "merging: 5 rows", "merging: 6 rows"]


def test_a_step_that_lasts_is_said_without_anybody_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_pgchange.feeds.attempt_phases.EVERY", 0.01)
    said, progress = Event(), Progress()
    with progress.reported_to(lambda _: said.set()):
        progress.at("reading", "5 changes")
        assert said.wait(60)


def test_changes_are_counted_as_they_are_read_and_closed(progress: Progress, clock: Clock) -> None:
    said: list[str] = []
    closed: list[bool] = []

    def changes() -> Generator[int, None, None]:
        try:
            yield from range(5)
        finally:
            closed.append(True)

    stream = changes()
    with progress.reported_to(said.append):
        counted = progress.counted(stream, 5000)
        next(counted)
        next(counted)
        clock.now += EVERY
        progress.again()
        counted.close()
    assert (said, closed) == (["reading: 2 of 5,000 changes"], [True])


def test_of_an_applications_notes_the_new_ones_are_said_and_of_each_step_the_latest(notes: Notes) -> None:
    assert (str(notes), notes.began) == ("starting", None)
    notes.add("reading", "5 changes")
    notes.add("stages", "1 of 2 done")
    notes.add("stages", "2 of 2 done")
    assert str(notes) == "reading: 5 changes\nstages: 2 of 2 done"
    assert str(notes) == "stages: 2 of 2 done"
    notes.add("staged public.total", "1 rows")
    assert str(notes) == "staged public.total: 1 rows"


def test_a_note_that_is_half_written_is_not_read(notes: Notes, tmp_path: Path) -> None:
    notes.add("reading", "5 changes")
    with (tmp_path / "manifest.json.notes").open("a") as file:
        file.write('[1.5, "stag')
    assert str(notes) == "reading: 5 changes"
    assert notes.began is not None


def test_a_note_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "gone" / "manifest.json")
    notes.add("reading", "5 changes")
    assert str(notes) == "starting"


@pytest.mark.parametrize("remote", [True, False])
def test_stages_are_noted_where_a_server_tells_of_them(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setattr(session, "is_remote", lambda: remote)
    handlers: list[Callable[..., Any]] = []
    spark: Any = SimpleNamespace(
        registerProgressHandler=handlers.append, removeProgressHandler=handlers.remove
    )
    with session.followed(spark, notes.add):
        for handler in handlers:
            handler(stages=None, inflight_tasks=0, operation_id=None, done=False)
            stages = [SimpleNamespace(done=True), SimpleNamespace(done=False)]
            handler(stages=stages, inflight_tasks=1, operation_id="a", done=False)
    assert handlers == []
    assert str(notes) == ("stages: 1 of 2 done" if remote else "starting")
