"""Which tests are of an expensive kind, read from the text alone, and which of these kinds a change needs.

The kinds are those of ``tests/suite/kinds.py``, which marks tests once they are collected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import PurePosixPath

from tests.suite.choosing.changes import Change
from tests.suite.choosing.graph import Graph, is_test
from tests.suite.choosing.parts import Part
from tests.suite.choosing.ranking import Choice, name_of

MAKERS = ("py:tests.spark_session", "py:tests.integration.conftest.connect_server")
"""Helpers that start a JVM. The recorded cost of a test does not include the JVM, which the tests of a worker share."""
AIRFLOW = re.compile(r"^\s*(?:from|import) airflow\b", re.MULTILINE)
SYSTEM = "tests/system/"
RELEASE = re.compile(r"^(?:@|pytestmark = )pytest\.mark\.release\(", re.MULTILINE)
KINDS = {"spark", "airflow"}


def needed(
    graph: Graph, changed: Sequence[Change], choices: Sequence[Choice]
) -> tuple[list[Choice], list[str]]:
    """Split off the tests of expensive kinds that a change does not need. Return the other tests, and the names of these
    kinds."""
    kinds = _kinds(graph)
    paths = [change.path for change in changed]
    wanted = set()
    if any("spark" in path for path in paths) or _is_of_spark(kinds, choices):
        wanted.add("spark")
    if any("airflow" in PurePosixPath(path).name or _faces_airflow(graph, path) for path in paths):
        wanted.add("airflow")
    unneeded = KINDS - wanted
    kept = [
        choice for choice in choices if choice.path in paths or not unneeded & kinds.get(choice.test, set())
    ]
    return kept, sorted(unneeded)


def of_a_release(graph: Graph) -> Set[str]:
    """Return the tests whose marker, or that of their file, leaves them to a release. Single cases do not count."""
    return {
        name_of(graph, index)
        for index, part in enumerate(graph.parts)
        if part.test and _leaves_to_release(graph.texts.get(part.path, ""), part)
    }


def _leaves_to_release(text: str, part: Part) -> bool:
    """Whether a marker of a test, or of its whole file, stands in the text of the file."""
    marks = RELEASE.finditer(text)
    lines = [(mark[0][0] == "p", text.count("\n", 0, mark.start()) + 1) for mark in marks]
    return any(of_file or part.first <= line <= part.last for of_file, line in lines)


def _is_of_spark(kinds: Mapping[str, Set[str]], choices: Sequence[Choice]) -> bool:
    """Whether half of the tests in the file of the best test start a JVM."""
    best = [kinds.get(choice.test, set()) for choice in choices if choice.path == choices[0].path]
    return 2 * sum("spark" in test for test in best) >= max(1, len(best))


def _kinds(graph: Graph) -> Mapping[str, Set[str]]:
    """The expensive kinds of each test that has any."""
    found: dict[str, Set[str]] = {test: {"spark"} for test in _tests_that_reach(graph, MAKERS)}
    for index, part in enumerate(graph.parts):
        if part.test and part.path.startswith(SYSTEM):
            found[name_of(graph, index)] = KINDS
    return found


def _tests_that_reach(graph: Graph, keys: Sequence[str]) -> set[str]:
    """Return the tests that reach the parts with these keys through fixtures and helpers of the tests."""
    within = tuple(f"{key}." for key in keys)
    reached = {
        index
        for index, part in enumerate(graph.parts)
        if any(key in keys or key.startswith(within) for key in part.keys)
    }
    waiting = list(reached)
    while waiting:
        for user in graph.users.get(waiting.pop(), ()):
            if user not in reached and _is_of_tests(graph.parts[user].path):
                reached.add(user)
                waiting.append(user)
    return {name_of(graph, i) for i in reached if graph.parts[i].test and is_test(graph.parts[i].path)}


def _is_of_tests(path: str) -> bool:
    """Whether a file is a test or a helper of tests. The files of ``tests/suite`` are neither."""
    return path.startswith("tests/") and not path.startswith("tests/suite/")


def _faces_airflow(graph: Graph, path: str) -> bool:
    """Whether a file, or another file in its folder of the package, imports Airflow."""
    pure = PurePosixPath(path)
    room = pure.parts[0] == "airflow_pgchange" and len(pure.parts) > 2
    texts = [
        text
        for other, text in graph.texts.items()
        if other == path or (room and PurePosixPath(other).parent == pure.parent)
    ]
    return path.endswith(".py") and any(AIRFLOW.search(text) for text in texts)
