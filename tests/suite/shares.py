"""Test files split among the workers of a run before they are collected.

With ``--dist each`` every worker of pytest-xdist runs all that it collects. Here each worker gets a share of the files,
so that it imports and collects those alone. The shares are made by greedy scheduling, the longest first, by the seconds
that the budget has for a file (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969). All files that use
Spark go to the same worker, because each worker would start its own session. The same holds for files that use
Airflow's API.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.suite import budget

SHARE = "share"
STARTED_ONCE = ("from tests.spark_session import", "airflow: FastAPI")
"""Text in a file whose tests use a resource that each process starts once, in seconds."""
COLLECTED = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker its share of the files, because each worker runs everything that it collects."""
    config = node.config
    if config.getoption("dist") != "each":
        return
    workers = len(config.getoption("tx"))
    number = int(node.gateway.id.removeprefix("gw"))
    duration = budget.durations(config.rootpath)
    node.workerinput[SHARE] = shares(arguments(config), workers, duration, start_of(config.rootpath))[number]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    node.config.stash[COLLECTED] = node.config.stash.get(COLLECTED, 0) + len(ids)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(config: pytest.Config) -> None:
    """Report progress as a part of all tests: pytest-xdist takes the number of tests of one worker for the number of
    all."""
    session = config.pluginmanager.get_plugin("session")
    if COLLECTED in config.stash and session is not None:
        session.testscollected = config.stash[COLLECTED]


def pytest_sessionstart(session: pytest.Session) -> None:
    share = getattr(session.config, "workerinput", {}).get(SHARE)
    if share is not None:
        session.config.args = share


def arguments(config: pytest.Config) -> list[str]:
    """Return the files and tests that a run was asked for. A folder stands for all test files in it."""
    found: list[str] = []
    for argument in config.args:
        path = config.invocation_params.dir / argument
        if path.is_dir():
            found += sorted(file.relative_to(config.rootpath).as_posix() for file in path.rglob("test_*.py"))
        else:
            found.append(argument)
    return found


def start_of(root: Path) -> Callable[[str], str]:
    """Return a function that returns the expensive resource which a test file starts once in a process.

    For a file without such a resource, the function returns the path of the file.
    """

    def start(path: str) -> str:
        text = (root / path).read_text()
        return next((start for start in STARTED_ONCE if start in text), path)

    return start


def shares(
    asked: Iterable[str], workers: int, duration: Callable[[str], float], start: Callable[[str], str]
) -> list[list[str]]:
    """Split files and tests (``path`` or ``path::name``) into one list for each worker.

    A file's tests stay together, and so do files of one start, unless they take longer than an equal share.
    """
    files: dict[str, list[str]] = {}
    for argument in asked:
        files.setdefault(argument.partition("::")[0], []).append(argument)
    seconds = {path: sum(map(duration, ids)) for path, ids in files.items()}
    loads: list[tuple[float, int]] = [(0.0, worker) for worker in range(workers)]
    split: list[list[str]] = [[] for _ in range(workers)]
    measured = [(sum(seconds[path] for path in piece), piece) for piece in _pieces(seconds, workers, start)]
    for length, piece in sorted(measured, key=lambda one: -one[0]):
        load, worker = heapq.heappop(loads)
        for path in piece:
            split[worker] += files[path]
        heapq.heappush(loads, (load + length, worker))
    return split


def _pieces(seconds: Mapping[str, float], workers: int, start: Callable[[str], str]) -> Iterable[list[str]]:
    """Yield the lists of files that must go to one worker."""
    together: dict[str, list[str]] = {}
    for path in seconds:
        together.setdefault(start(path), []).append(path)
    equal = sum(seconds.values()) / workers
    for paths in together.values():
        if sum(seconds[path] for path in paths) <= equal:
            yield paths
        else:
            yield from ([path] for path in paths)
