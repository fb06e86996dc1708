"""The position of an event in the catalogue's log."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True, slots=True)
class Raft:
    """A position, ordered by term and then by index.

    ``snapshot`` is the number of the client's snapshot in which the position was read, or 0. It does not count in
    comparisons.
    """

    term: int
    index: int
    snapshot: int = field(default=0, compare=False, repr=False)
