"""A map from ranges of numbers to their owners."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int, str]
"""The first and the last number, both inclusive, and their owner."""


class Ranges:
    """Ordered ranges without overlaps. Immutable, so any thread can read them."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        """Build the map from ``ranges`` in any order. A later range replaces what it overlaps of earlier ones."""
        starts: list[int] = []
        ends: list[int] = []
        owners: list[str] = []
        for start, end, owner in ranges:
            first, last = bisect_left(ends, start), bisect_right(starts, end)
            before = (
                [(starts[first], start - 1, owners[first])] if first < last and starts[first] < start else []
            )
            behind = (
                [(end + 1, ends[last - 1], owners[last - 1])] if first < last and ends[last - 1] > end else []
            )
            put = [*before, (start, end, owner), *behind]
            starts[first:last], ends[first:last], owners[first:last] = map(list, zip(*put, strict=True))
        self._starts, self._ends, self._owners = starts, ends, owners

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, self._owners, strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    def owner(self, number: int) -> str | None:
        """Return the owner of a number; None if it has no owner."""
        index = bisect_right(self._starts, number) - 1
        return self._owners[index] if index >= 0 and number <= self._ends[index] else None
