"""The tests that ``make check`` runs for a change, and that a mutant has to get past."""

from __future__ import annotations

from collections.abc import Sequence

from tests.suite.choosing.changes import Change
from tests.suite.choosing.graph import Graph
from tests.suite.choosing.kinds import needed
from tests.suite.choosing.ranking import Choice, rank


def concerned(graph: Graph, changed: Sequence[Change]) -> tuple[list[Choice], list[str]]:
    """Return the tests, best first, and the expensive kinds of tests that are left out as not needed."""
    return needed(graph, changed, rank(graph, changed))
