"""The operations log that the demo replays."""

from __future__ import annotations

from collections import Counter

from demo import flights


def test_the_year_has_every_departure_arrival_and_cancellation():
    kinds = Counter(row[0] for row in flights.movements(365))
    assert kinds == {"departure": 328_521, "arrival": 328_063, "cancellation": 8_255}


def test_the_first_week_comes_in_the_order_in_which_it_happened():
    rows = flights.movements(7)
    assert len(rows) == 12_160
    assert [row[6] for row in rows] == sorted(row[6] for row in rows)


def test_the_figures_from_the_file_agree_with_the_movements():
    rows = flights.movements(7)
    counts = Counter((*row[2:3], *row[4:6], row[0]) for row in rows)
    for carrier, origin, dest, departures, arrivals, cancellations, _, _ in flights.expected(7):
        route = (carrier, origin, dest)
        found = [counts[(*route, kind)] for kind in ("departure", "arrival", "cancellation")]
        assert found == [departures, arrivals, cancellations]
