"""Which tests a mutant has to get past."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.suite.choosing.changes import Change
from tests.suite.choosing.concern import concerned
from tests.suite.choosing.costs import cost
from tests.suite.choosing.graph import Graph, read_graph
from tests.suite.choosing.ranking import within
from tests.suite.mutants.mutant import Mutant


def chosen(root: Path, mutant: Mutant, seconds: float) -> list[str]:
    """The tests that ``make check`` would run for a change of this line, the likeliest to notice it first."""
    choices, skipped = concerned(_graph(root), [Change(mutant.file, frozenset({mutant.line}))])
    taken, _ = within(choices, seconds, cost)
    marked = ["-m", " and ".join(f"not {kind}" for kind in skipped)] if skipped else []
    return [*(choice.path for choice in taken), "--as-named", *marked]


@cache
def _graph(root: Path) -> Graph:
    return read_graph(root)
