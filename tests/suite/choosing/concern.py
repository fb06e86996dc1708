"""What a change is about: the test files that ``make check`` runs for it, and that a mutant has to get past."""

from __future__ import annotations

from collections.abc import Sequence

from tests.suite.choosing.changes import Change
from tests.suite.choosing.costs import unneeded
from tests.suite.choosing.graph import Graph
from tests.suite.choosing.ranking import Choice, rank

# A file that is this much less about a change than the best one is not worth the wait.
FAINT = 0.02


def concerned(graph: Graph, changed: Sequence[Change]) -> tuple[list[Choice], list[str]]:
    """The test files, best first, and the markers of the expensive tests in them that are not about what changed."""
    every = rank(graph, changed)
    choices = [choice for choice in every if choice.score >= every[0].score * FAINT]
    own = [choice for choice in every if choice.path in {change.path for change in changed}]
    choices += [choice for choice in own if choice not in choices]
    return choices, unneeded(graph, changed, choices)
