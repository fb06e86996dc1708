"""Where in the catalogue's history something happened."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True, slots=True)
class Raft:
    """A later term is later, whatever its index. ``snapshot``, which does not count, is 0, or the number of the snapshot
    behind which a client was there."""

    term: int
    index: int
    snapshot: int = field(default=0, compare=False, repr=False)
