"""The tests that ``make check`` runs for a change, and that judge a mutant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.suite.choosing.changes import Change
from tests.suite.choosing.graph import Graph
from tests.suite.choosing.kinds import needed, of_a_release
from tests.suite.choosing.ranking import Choice, rank

NEAR = 100
"""The number of best tests among which to search for tests that only a release runs.

Nearly all tests reach any change.
"""


@dataclass(frozen=True)
class Concern:
    """The tests that a change concerns, best first."""

    tests: Sequence[Choice]
    unneeded: Sequence[str]
    """The expensive kinds of tests that are left out, because the change does not need them."""
    of_a_release: Sequence[Choice]
    """The tests near the change that only a release runs."""


def concerned(graph: Graph, changed: Sequence[Change]) -> Concern:
    ranked = rank(graph, changed)
    released = of_a_release(graph)
    kept, unneeded = needed(graph, changed, [choice for choice in ranked if choice.test not in released])
    return Concern(kept, unneeded, [choice for choice in ranked[:NEAR] if choice.test in released])
