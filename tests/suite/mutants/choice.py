"""Which test files a mutant has to get past."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.suite.choosing.changes import Change
from tests.suite.choosing.costs import cost
from tests.suite.choosing.graph import Graph, read_graph
from tests.suite.choosing.ranking import rank, within
from tests.suite.mutants.mutant import Mutant


def chosen(root: Path, mutant: Mutant, seconds: float) -> list[str]:
    """The test files that ``make check`` would run for a change of this line."""
    change = Change(mutant.file, frozenset({mutant.line}))
    taken, _ = within(rank(_graph(root), [change]), seconds, cost)
    return [choice.path for choice in taken]


@cache
def _graph(root: Path) -> Graph:
    return read_graph(root)
