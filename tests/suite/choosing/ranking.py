"""The tests that a change concerns, the likeliest to notice it first. Nothing here is a list kept by hand.

A test is reached through the functions that use a changed function, and the functions that use those. The tests of each
user of a function take turns. So a function of the core that all feeds call comes with tests of each feed. All these
take turns with the tests whose names share the most telling words with the change.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePosixPath

from tests.suite.choosing.changes import Change
from tests.suite.choosing.graph import Graph, is_test

STEP = 0.5
"""The factor of a weight for each step from a function to its user. It fits the history of this repository: the tests
that were changed together with the sources."""
LEAST = 1e-7
KIN = 5.0
"""How much more a test counts that shares all telling words with the change than a test that shares none."""
HEAD, EACH = 10, 0.3
"""Choices are ordered by (place + HEAD) * (cost + EACH), with the cost in seconds. Of 28 planted faults the tests that
are chosen so catch 26. The tests that were taken by their place alone, for as many CPU seconds, caught 18."""
ROOT = -1


@dataclass(frozen=True)
class Choice:
    """A test function (``path::name``), and the way from it to the change."""

    test: str
    why: str

    @property
    def path(self) -> str:
        return self.test.partition("::")[0]


def rank(graph: Graph, changed: Sequence[Change]) -> list[Choice]:
    """Return all tests that reach a change, best first."""
    touched, beside = _parts(graph, changed)
    kinship = _kinship(graph, changed, touched)
    chosen: dict[str, Choice] = {}
    for parts in (touched, beside, _of_folder(graph, changed)):
        weights, through = _spread(graph, parts)
        turns = _turns(graph, weights, through, kinship)
        kin = sorted(turns, key=lambda test: -kinship.get(test, 0.0))
        for test in _in_turn([turns, kin]):
            name = name_of(graph, test)
            if name not in chosen:
                chosen[name] = Choice(name, _way(graph, test, through))
    return list(chosen.values())


def within(
    choices: Sequence[Choice], seconds: float, cost: Callable[[str], float]
) -> tuple[list[Choice], list[Choice]]:
    """Split choices into those that there is time for, and the rest. The first is always taken.

    A cheap test comes before an expensive test that is only slightly better, because many cheap tests notice more.
    """
    taken: list[Choice] = []
    left: list[Choice] = []
    ordered = sorted(
        enumerate(choices), key=lambda placed: (HEAD + placed[0]) * (EACH + cost(placed[1].test))
    )
    for _, choice in ordered:
        if taken and cost(choice.test) > seconds:
            left.append(choice)
        else:
            taken.append(choice)
            seconds -= cost(choice.test)
    return taken, left


def name_of(graph: Graph, test: int) -> str:
    """Return a test part as pytest names it, without parameters."""
    part = graph.parts[test]
    [key] = (key for key in part.keys if key.startswith("py:"))
    return f"{part.path}::{key.rpartition('.')[2]}"


def _parts(graph: Graph, changed: Sequence[Change]) -> tuple[list[int], list[int]]:
    """Return the parts with changed lines, and the other parts of the changed files."""
    lines = {change.path: change.lines for change in changed}
    touched: list[int] = []
    beside: list[int] = []
    for index, part in enumerate(graph.parts):
        if part.path in lines:
            near = lines[part.path]
            hit = near is None or any(part.first <= line <= part.last for line in near)
            (touched if hit else beside).append(index)
    return touched, beside


def _of_folder(graph: Graph, changed: Iterable[Change]) -> list[int]:
    """Tests that are named after the folder of a changed module: they may reach it by a command line."""
    folders = [PurePosixPath(c.path).parent for c in changed if c.path.endswith(".py")]
    words = [_words(folder.name) for folder in folders if len(folder.parts) > 1]
    return [
        index
        for index, part in enumerate(graph.parts)
        if part.test and is_test(part.path) and any(folder <= _words(part.path) for folder in words)
    ]


def _spread(graph: Graph, seeds: Sequence[int]) -> tuple[dict[int, float], dict[int, int]]:
    """Return the weight of each part by the shortest way from a change, and the previous part on that way.

    The previous part of a seed is ``ROOT``. A step costs more if more files take it, because a test that uses a common
    function is seldom about that function.
    """
    weights: dict[int, float] = {}
    through: dict[int, int] = {}
    waiting = [(-1.0, index, ROOT) for index in seeds]
    heapq.heapify(waiting)
    while waiting:
        weight, index, origin = heapq.heappop(waiting)
        if index in weights:
            continue
        weights[index] = -weight
        through[index] = origin
        users = graph.users.get(index, ())
        files = len({graph.parts[user].path for user in users})
        onward = weight * STEP / math.sqrt(files or 1)
        if -onward > LEAST:
            for user in users:
                if user not in weights:
                    heapq.heappush(waiting, (onward, user, index))
    return weights, through


def _turns(
    graph: Graph, weights: Mapping[int, float], through: Mapping[int, int], kinship: Mapping[int, float]
) -> list[int]:
    """Return the tests of a tree in order. In ``through`` each part has its parent.

    At each part the branches take turns, the best branch first.
    """
    branches: dict[int, list[int]] = defaultdict(list)
    for index, origin in through.items():
        branches[origin].append(index)
    best: dict[int, float] = defaultdict(float)
    ordered: dict[int, list[int]] = {}
    # A part comes after its origin, so that in reverse each branch is complete before its origin needs it.
    for index in [*reversed(through), ROOT]:
        part = graph.parts[index] if index != ROOT else None
        own = [index] if part is not None and part.test and is_test(part.path) else []
        if own:
            best[index] = weights[index] * (1 + KIN * kinship.get(index, 0.0))
        below = sorted(branches[index], key=lambda branch: (-best[branch], branch))
        best[index] = max([best[index], *(best[branch] for branch in below)])
        ordered[index] = own + list(_in_turn([ordered.pop(branch) for branch in below]))
    return ordered[ROOT]


def _in_turn(lists: Sequence[Sequence[int]]) -> Iterator[int]:
    for turn in zip_longest(*(one for one in lists if one)):
        yield from (test for test in turn if test is not None)


def _kinship(graph: Graph, changed: Sequence[Change], touched: Sequence[int]) -> dict[int, float]:
    """Return by test a number from 0 to 1: the share of the telling words of the change that its names have.

    A word counts by its inverse document frequency: a word that is in most names tells nothing (K. Sparck Jones, A
    statistical interpretation of term specificity, 1972).
    """
    tests = {
        index: _words(name_of(graph, index))
        for index, part in enumerate(graph.parts)
        if part.test and is_test(part.path)
    }
    counts = Counter(word for words in tests.values() for word in words)
    changed_words = _changed_words(graph, changed, touched)
    telling = {word: math.log(len(tests) / counts[word]) for word in changed_words if counts[word]}
    shared = {index: sum(telling.get(word, 0.0) for word in words) for index, words in tests.items()}
    most = max(shared.values(), default=0.0) or 1.0
    return {index: value / most for index, value in shared.items()}


def _changed_words(graph: Graph, changed: Sequence[Change], touched: Sequence[int]) -> set[str]:
    """The words of the changed lines, of the names of their parts, and of the files' names."""
    words = set[str]()
    for change in changed:
        words |= _words(PurePosixPath(change.path).stem)
        lines = graph.texts.get(change.path, "").splitlines()
        for line in change.lines or ():
            words |= _words(lines[line - 1]) if 0 < line <= len(lines) else set()
    for index in touched:
        for key in graph.parts[index].keys:
            words |= _words(key.rpartition(".")[2])
    return words


def _words(text: str) -> set[str]:
    return {word.rstrip("s") for word in re.split(r"[^a-z]+", text.lower()) if len(word) > 1} - {"test", "py"}


def _way(graph: Graph, test: int, through: Mapping[int, int]) -> str:
    """Name the parts between a test and the change, nearest first."""
    steps = []
    part = through[test]
    while part != ROOT:
        keys = sorted(key for key in graph.parts[part].keys if key.startswith(("py:", "sql:")))
        steps.append(keys[0].partition(":")[2] if keys else graph.parts[part].path)
        part = through[part]
    return (
        "uses " + ", ".join(step.removeprefix("airflow_pgchange.") for step in steps)
        if steps
        else "changed itself"
    )
