"""The time from a commit to its result."""

from __future__ import annotations

from demo.latency import Latency


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(*events: tuple[float, str, int]) -> Latency:
    clock = Clock()
    latency = Latency(clock)
    for clock.now, what, count in events:
        getattr(latency, what)(count)
    return latency


def test_a_change_is_in_the_result_once_as_many_are() -> None:
    latency = measured((0, "committed", 10), (1, "committed", 10), (3, "in_result", 10), (4, "in_result", 20))
    assert latency.percentiles(0.5, 1) == [3, 3]


def test_a_share_of_the_changes_is_one_of_changes_and_not_of_commits() -> None:
    latency = measured((0, "committed", 98), (0, "committed", 2), (1, "in_result", 98), (9, "in_result", 100))
    assert latency.percentiles(0.5, 0.95, 0.99) == [1, 1, 9]


def test_a_change_that_is_not_in_the_result_yet_is_left_out() -> None:
    latency = measured((0, "committed", 1), (0, "committed", 1), (2, "in_result", 1))
    assert latency.percentiles(1) == [2]
    assert measured((0, "committed", 1)).percentiles(0.5) == []


def test_changes_before_the_first_result_can_be_left_out() -> None:
    latency = measured(
        (0, "in_result", 0),
        (0, "committed", 1),
        (9, "in_result", 1),
        (10, "committed", 1),
        (12, "in_result", 2),
    )
    assert latency.percentiles(1) == [9]
    assert latency.percentiles(1, started=True) == [2]
    assert measured((0, "committed", 1)).percentiles(1, started=True) == []


def test_a_figure_that_was_not_measured_is_not_reported() -> None:
    before = [(0, "committed", 2), (9, "in_result", 2)]
    whole = "commit to result: p50 9.0 s, p95 9.0 s"
    assert measured((0, "committed", 1)).report() == "no change came to the result"
    assert measured(*before).report() == whole
    later = measured(*before, (10, "committed", 2), (12, "in_result", 4))
    assert (
        later.report()
        == "commit to result: p50 2.0 s, p95 9.0 s; of changes after the first result 2.0 and 2.0 s"
    )


def test_the_last_commit_is_the_latest_whichever_writer_told_first() -> None:
    assert measured((1, "committed", 1), (5, "committed", 1), (7, "in_result", 2)).last_commit == 5
