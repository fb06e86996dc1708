"""The operations log that the demo replays."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import takewhile

import pytest

from demo import flights


@pytest.mark.release("seconds: a week of the same file has its order and its figures checked by each change")
def test_the_year_has_every_departure_arrival_and_cancellation():
    kinds = Counter(row[0] for row in flights.movements(365))
    assert kinds == {"departure": 328_521, "arrival": 328_063, "cancellation": 8_255}


def test_the_first_week_comes_in_the_order_in_which_it_happened():
    rows = flights.movements(7)
    assert len(rows) == 12_160
    assert [row[6] for row in rows] == sorted(row[6] for row in rows)


def test_the_figures_from_the_file_agree_with_the_movements():
    counts: Counter[tuple[str, ...]] = Counter()
    delays: Counter[tuple[str, ...]] = Counter()
    for kind, _, carrier, _, origin, dest, _, delay in flights.movements(7):
        counts[carrier, origin, dest, kind] += 1
        delays[carrier, origin, dest, kind] += delay or 0
    expected = flights.expected(7)
    kinds = ("departure", "arrival", "cancellation")
    assert sum(counts.values()) == sum(sum(row[3:6]) for row in expected)
    for *route, departures, arrivals, cancellations, departure_delay, arrival_delay in expected:
        assert [counts[*route, kind] for kind in kinds] == [departures, arrivals, cancellations]
        assert [delays[*route, kind] for kind in kinds] == [departure_delay, arrival_delay, 0]


def test_a_writer_stops_before_a_moment_that_is_not_due_when_it_is_told_to(monkeypatch):
    written: list[list[flights.Row]] = []
    monkeypatch.setattr(flights, "_write", lambda _, spans, __, go_on: written.extend(_taken(spans, go_on)))
    stop = threading.Event()
    stop.set()
    flights.replay("", flights.movements(1), 4, lambda _: None, seconds=3600, stop=stop)
    assert written == []


def test_writers_are_divided_by_flight_and_keep_its_order(monkeypatch):
    shares: list[list[flights.Row]] = []
    monkeypatch.setattr(
        flights, "_write", lambda _, spans, __, ___: shares.append([row for span in spans for row in span])
    )
    rows = flights.movements(7)
    flights.replay("", rows, 4, lambda _: None)
    of_flights = [{row[2:5] for row in share} for share in shares]
    assert sum(map(len, of_flights)) == len(set().union(*of_flights)), "a flight has two writers"
    assert all([row[6] for row in share] == sorted(row[6] for row in share) for share in shares)
    assert sum(map(len, shares)) == len(rows)


def _taken(
    spans: Iterable[list[flights.Row]], go_on: Callable[[datetime], bool]
) -> Iterator[list[flights.Row]]:
    return takewhile(lambda span: go_on(span[-1][6]), spans)
