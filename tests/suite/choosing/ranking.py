"""Which test files a change concerns, the likeliest to notice it first. Nothing here is a list kept by hand."""

from __future__ import annotations

import gc
import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.suite.choosing.changes import Change
from tests.suite.choosing.graph import Graph, is_test, read_graph

# What a step through the graph leaves of a weight, and what the unchanged parts of a changed file weigh. These fit what
# the history of this repository says: which test files were changed together with which sources.
STEP = 0.5
UNCHANGED = 0.05
LEAST = 1e-7
BY_NAME = 0.005


@dataclass(frozen=True)
class Choice:
    """A test file, how much of it is about the change, and how it comes to that."""

    path: str
    score: float
    why: str


def choose(repo: Path, changed: Sequence[Change]) -> list[Choice]:
    """All test files that reach what changed, best first."""
    # Nothing of what is read becomes garbage: looking for it would take a third of the time.
    gc.disable()
    try:
        return rank(read_graph(repo), changed)
    finally:
        gc.enable()


def rank(graph: Graph, changed: Sequence[Change]) -> list[Choice]:
    """The same for a graph that is there already."""
    tests = Counter(part.path for part in graph.parts if part.test)
    weights, through = _spread(graph, _seeds(graph, changed))
    reached: dict[str, list[int]] = defaultdict(list)
    for index in weights:
        if graph.parts[index].test and is_test(graph.parts[index].path):
            reached[graph.parts[index].path].append(index)
    found = []
    for path in filter(is_test, tests):
        score = sum(weights[part] for part in reached[path]) / math.sqrt(tests[path])
        score = score * (1 + _alike(path, changed)) + BY_NAME * _of_folder(path, changed)
        if score:
            best = max(reached[path], key=lambda part: (weights[part], -part), default=None)
            found.append(Choice(path, score, "by its name" if best is None else _way(graph, best, through)))
    found.sort(key=lambda choice: (-choice.score, choice.path))
    own = {change.path for change in changed if is_test(change.path) and change.path in tests}
    top = found[0].score + 1 if found else 1.0
    return [
        *(Choice(path, top, "changed itself") for path in sorted(own)),
        *(choice for choice in found if choice.path not in own),
    ]


def within(
    choices: Sequence[Choice], seconds: float, cost: Callable[[str], float]
) -> tuple[list[Choice], list[Choice]]:
    """The choices that there is time for, in their order, and those left out. The first is always taken."""
    taken: list[Choice] = []
    left: list[Choice] = []
    for choice in choices:
        if taken and cost(choice.path) > seconds:
            left.append(choice)
        else:
            taken.append(choice)
            seconds -= cost(choice.path)
    return taken, left


def _seeds(graph: Graph, changed: Iterable[Change]) -> dict[int, float]:
    """What changed, each file with a weight of one, most of it where its changed lines are."""
    lines = {change.path: change.lines for change in changed}
    weights = {
        index: 1.0 if _touched(lines[part.path], part.first, part.last) else UNCHANGED
        for index, part in enumerate(graph.parts)
        if part.path in lines
    }
    sums: dict[str, float] = defaultdict(float)
    for index, weight in weights.items():
        sums[graph.parts[index].path] += weight
    return {index: weight / sums[graph.parts[index].path] for index, weight in weights.items()}


def _touched(lines: frozenset[int] | None, first: int, last: int) -> bool:
    return lines is None or any(first <= line <= last for line in lines)


def _spread(graph: Graph, seeds: Mapping[int, float]) -> tuple[dict[int, float], dict[int, int]]:
    """The weight that comes to each part by the shortest way, and from where.

    A step is the longer the more files take it: who calls what everybody calls is not about that.
    """
    weights: dict[int, float] = {}
    through: dict[int, int] = {}
    waiting = [(-weight, index, index) for index, weight in seeds.items()]
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


def _alike(test: str, changed: Iterable[Change]) -> float:
    """How many of the words of a changed file's name a test file has in its own."""
    words = _words(test)
    return max(
        (len(own & words) / len(own) for own in map(_words, (c.path for c in changed)) if own), default=0.0
    )


def _of_folder(test: str, changed: Iterable[Change]) -> bool:
    """Whether a test file is named after a folder of modules that changed: it may come to them by a command line."""
    paths = [PurePosixPath(change.path) for change in changed if change.path.endswith(".py")]
    return any(len(path.parts) > 2 and _words(path.parent.name) <= _words(test) for path in paths)


def _words(path: str) -> set[str]:
    stem = PurePosixPath(path).stem.removeprefix("test_")
    return {word.rstrip("s") for word in re.split(r"[^a-z]+", stem) if len(word) > 1}


def _way(graph: Graph, test: int, through: Mapping[int, int]) -> str:
    """What a test uses that leads to the change, nearest first."""
    steps = []
    part = test
    while through[part] != part:
        part = through[part]
        keys = sorted(key for key in graph.parts[part].keys if key.startswith(("py:", "sql:")))
        steps.append(keys[0].partition(":")[2] if keys else graph.parts[part].path)
    return "uses " + ", ".join(step.removeprefix("airflow_pgchange.") for step in steps)
