"""When a backlog wakes a consumer, on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.triggers.backlog_alarm import FIRST_PAUSE, LONGEST_PAUSE, SETTLE, Alarm

HERE = {"version": 1}
THERE = {"version": 2}
NEVER = False


def lag(ready: int, age: float | None = 1.0) -> Lag:
    return Lag(ready=ready, waiting=0, ready_age=age if ready else None)


def rings(
    alarm: Alarm,
    seconds: float,
    *,
    start: float = 0.0,
    position: dict[str, int] = HERE,
    backlog: Lag | None = None,
    at_work: Callable[[float], bool] = lambda now: NEVER,
) -> list[float]:
    """Return the times at which the alarm fires if it is checked ten times a second."""
    found = lag(10) if backlog is None else backlog
    times = []
    for tick in range(round(seconds * 10)):
        now = start + tick / 10
        if alarm.due(position, found, now):
            if at_work(now):
                alarm.at_work(now)
            elif alarm.idle(now):
                times.append(now)
    return times


def test_a_backlog_that_is_there_at_the_start_rings_at_once() -> None:
    assert rings(Alarm(), 0.1) == [0.0]


def test_nothing_ready_never_rings() -> None:
    assert rings(Alarm(), 600, backlog=lag(0)) == []


def test_fewer_than_min_changes_do_not_ring() -> None:
    assert rings(Alarm(min_changes=11), 600) == []


def test_an_old_change_rings_before_there_are_min_changes() -> None:
    assert rings(Alarm(min_changes=11, max_age=30), 1, backlog=lag(1, age=30.0)) == [0.0]


def test_a_young_change_waits_for_its_time() -> None:
    assert rings(Alarm(min_changes=11, max_age=30), 1, backlog=lag(1, age=29.9)) == []


def test_the_same_backlog_rings_again_with_pauses_that_double_up_to_a_limit() -> None:
    times = rings(Alarm(), 3600)
    pauses = [round(later - earlier, 1) for earlier, later in pairwise(times)]
    assert pauses[:5] == [FIRST_PAUSE, 60.0, 120.0, 240.0, LONGEST_PAUSE]
    assert set(pauses[5:]) == {LONGEST_PAUSE}


def test_progress_with_a_backlog_left_rings_again_soon() -> None:
    alarm = Alarm()
    rings(alarm, 1)
    assert rings(alarm, 5, start=5.0, position=THERE) == [5.0 + SETTLE]


def test_progress_forgets_the_pauses() -> None:
    alarm = Alarm()
    rings(alarm, 600)
    times = rings(alarm, FIRST_PAUSE + 5, start=600.0, position=THERE)
    assert [round(later - times[0], 1) for later in times] == [0.0, FIRST_PAUSE]


def test_a_backlog_that_came_after_it_was_empty_rings_at_once() -> None:
    alarm = Alarm()
    rings(alarm, 100)
    rings(alarm, 1, start=100.0, backlog=lag(0))
    assert rings(alarm, 1, start=101.0) == [101.0]


def test_it_is_silent_while_a_consumer_is_at_work() -> None:
    assert rings(Alarm(), 600, at_work=lambda now: True) == []


def test_a_lock_that_is_held_is_looked_at_again_after_a_second_and_not_before() -> None:
    alarm = Alarm()
    assert alarm.due(HERE, lag(1), 5.0)
    alarm.at_work(5.0)
    assert [alarm.due(HERE, lag(1), at) for at in (5.9, 6.0)] == [False, True]


def test_a_consumer_that_ended_without_progress_is_given_a_pause() -> None:
    times = rings(Alarm(), 90, at_work=lambda now: now < 30)
    assert times[0] >= 30 + FIRST_PAUSE


def test_a_consumer_that_fails_again_and_again_is_woken_less_and_less() -> None:
    starts: list[float] = []

    def at_work(now: float) -> bool:
        return any(start <= now < start + 5 for start in starts)

    alarm, now = Alarm(), 0.0
    while now < 3600:
        if alarm.due(HERE, lag(10), now):
            if at_work(now):
                alarm.at_work(now)
            elif alarm.idle(now):
                starts.append(now + 2)
        now += 0.1
    assert len(starts) < 20
    assert starts[-1] - starts[-2] >= LONGEST_PAUSE


def test_a_batch_of_ten_minutes_gives_at_most_two_rings() -> None:
    alarm = Alarm()
    times = rings(alarm, 603, at_work=lambda now: now >= 3)
    times += rings(alarm, 3, start=603.0, position=THERE, backlog=lag(7))
    assert len(times) == 2


def test_a_consumer_that_drains_is_not_disturbed_between_two_batches() -> None:
    alarm = Alarm()
    rings(alarm, 100, at_work=lambda now: now >= 3)
    assert rings(alarm, 100, start=100.0, position=THERE, at_work=lambda now: now >= 100.2) == []
