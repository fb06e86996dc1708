"""Where in the catalogue's history something happened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Raft:
    """A later term is later, whatever its index."""

    term: int
    index: int
