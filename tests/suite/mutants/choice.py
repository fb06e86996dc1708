"""The tests that judge a mutant: those that ``make check`` chooses for its line, and then all tests of its feed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.suite import budget
from tests.suite.choosing.changes import Change
from tests.suite.choosing.concern import concerned
from tests.suite.choosing.feeds import FEEDS, FOLDERS, of_feed, schemas_of
from tests.suite.choosing.graph import Graph, read_graph
from tests.suite.choosing.ranking import within
from tests.suite.mutants.mutant import Mutant
from tests.suite.mutants.tree import slowness

FARTHER = 3
"""The factor for a file that belongs to no feed: its mutants are judged by this many times the tests of ``make
check``."""
ALL_FEEDS = "tests/integration/core/"
"""The folder of tests over all feeds. Tests in it that reach a mutant count as tests of the mutant's feed."""
OPTIONS = ("--as-named", "-m", "not spark and not airflow")
HANGS = 45.0
"""Seconds on an idle machine after which a test counts as hanging, which means that it has detected the fault. Without a
fault no test takes over 6 s."""


@dataclass(frozen=True)
class Jury:
    """The tests for a mutant in order, the choice of ``make check`` and then the rest, and options of pytest."""

    quick: tuple[str, ...]
    rest: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        return [*self.quick, *self.rest, *self.options]


def jury(root: Path, mutant: Mutant, seconds: float) -> Jury:
    """Choose the tests that judge a mutant. ``seconds`` is the time that ``make check`` has."""
    graph, price = _graph(root), budget.durations(root)
    choices = concerned(graph, [Change(mutant.file, frozenset({mutant.line}))]).tests
    quick, left = within(choices, seconds, price)
    feeds = [feed for feed in FEEDS if mutant.feed in _schemas(root, feed)]
    if feeds:
        rest = [choice.test for feed in feeds for choice in of_feed(graph, feed)]
        rest += [choice.test for choice in left if choice.path.startswith(ALL_FEEDS)]
    else:
        near = [choice for choice in left if choice.path.startswith(FOLDERS)]
        rest = [choice.test for choice in within(near, FARTHER * seconds, price)[0]] if near else []
    first = _by_file([choice.test for choice in quick])
    others = _by_file([test for test in rest if test not in set(first)])
    return Jury(tuple(first), tuple(others), (*OPTIONS, "--timeout", f"{HANGS * slowness():.0f}"))


def _by_file(tests: list[str]) -> list[str]:
    """Group the tests by file, at the place of the file's first test, because they share expensive fixtures."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    return sorted(tests, key=lambda test: files.index(test.partition("::")[0]))


@cache
def _graph(root: Path) -> Graph:
    return read_graph(root)


@cache
def _schemas(root: Path, feed: str) -> set[str]:
    return schemas_of(_graph(root), feed)
