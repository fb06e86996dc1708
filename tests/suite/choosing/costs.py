"""What it costs to run a test file, and which expensive kinds of tests a change needs."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from tests.suite import budget
from tests.suite.choosing.changes import Change
from tests.suite.choosing.graph import Graph, is_test
from tests.suite.choosing.ranking import Choice
from tests.suite.run import ROOT

# Of a file that nobody has measured: what a test takes in seconds, and one of a whole Airflow or of a campaign of faults.
A_TEST, A_CAMPAIGN = 0.35, 10.0
QUICK = ("tests/unit/", "tests/integration/")
TEST = re.compile(r"^\s*(?:async )?def test_", re.MULTILINE)
AIRFLOW = re.compile(r"^\s*(?:from|import) airflow\b", re.MULTILINE)
OWN_CLUSTERS = ("py:tests.conftest.own_cluster", "py:tests.chaos.conftest.empty_cluster")
SPARK_SESSION = "py:tests.spark_session"
# So many of the best files say what a change needs.
BEST = 3


def cost(path: str) -> float:
    """The processor's seconds of a test file, as measured, or else by the number of its tests."""
    measured = _measured().get(path)
    if measured is not None:
        return measured
    tests = len(TEST.findall((ROOT / path).read_text()))
    return tests * (A_TEST if path.startswith(QUICK) else A_CAMPAIGN)


@functools.cache
def _measured() -> Mapping[str, float]:
    recorded = budget.recorded(ROOT)
    return {} if recorded is None else recorded.files


def unneeded(graph: Graph, changed: Sequence[Change], chosen: Sequence[Choice]) -> list[str]:
    """The markers of the expensive tests that are not about what changed."""
    paths = [change.path for change in changed]
    needed = {
        "own_server": any(_share(graph, choice.path, *OWN_CLUSTERS) >= 0.5 for choice in chosen[:BEST]),
        "spark": any(
            "spark" in path or (is_test(path) and _share(graph, path, SPARK_SESSION)) for path in paths
        )
        or any(_share(graph, choice.path, SPARK_SESSION) >= 0.5 for choice in chosen[:1]),
        "airflow": any("airflow" in PurePosixPath(path).name or _faces_airflow(path) for path in paths),
    }
    return [kind for kind, is_needed in needed.items() if not is_needed]


def _faces_airflow(path: str) -> bool:
    """Whether a file, or one beside it in its part of the package, imports Airflow."""
    pure = PurePosixPath(path)
    whole = pure.parts[0] == "airflow_pgchange" and len(pure.parts) > 2
    files = (ROOT / pure.parent).glob("*.py") if whole else [ROOT / path] if pure.suffix == ".py" else []
    return any(AIRFLOW.search(file.read_text()) for file in files if file.exists())


def _share(graph: Graph, path: str, *keys: str) -> float:
    """How many of a file's tests come to what keys name, by fixtures and helpers of the tests."""
    within = tuple(f"{key}." for key in keys)
    reached = {
        i for i, part in enumerate(graph.parts) if any(k in keys or k.startswith(within) for k in part.keys)
    }
    helpers = {i for i, part in enumerate(graph.parts) if _is_of_tests(part.path)}
    waiting = list(reached)
    while waiting:
        for user in graph.users.get(waiting.pop(), ()):
            if user not in reached and user in helpers:
                reached.add(user)
                waiting.append(user)
    tests = [i for i, part in enumerate(graph.parts) if part.test and part.path == path]
    return len(reached.intersection(tests)) / max(1, len(tests))


def _is_of_tests(path: str) -> bool:
    """Whether a file is a test, or helps tests; what runs them is neither."""
    return path.startswith("tests/") and not path.startswith("tests/suite/")
