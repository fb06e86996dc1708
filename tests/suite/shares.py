"""Test files split among the workers of a run before they are collected.

With ``--dist each`` every worker of pytest-xdist runs all that it collects. Here each worker gets a share of the files,
so that it imports and collects those alone. The shares are made by greedy scheduling, the longest file first, by the
seconds that the budget has for a file (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.suite import budget

SHARE = "share"
COLLECTED = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker its share, where each worker runs what it collects."""
    config = node.config
    if config.getoption("dist") != "each":
        return
    workers = len(config.getoption("tx"))
    number = int(node.gateway.id.removeprefix("gw"))
    node.workerinput[SHARE] = shares(arguments(config), workers, budget.durations(config.rootpath))[number]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    node.config.stash[COLLECTED] = node.config.stash.get(COLLECTED, 0) + len(ids)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(config: pytest.Config) -> None:
    """Let the progress be a part of all tests: pytest-xdist takes the number of one worker's tests for all."""
    session = config.pluginmanager.get_plugin("session")
    if COLLECTED in config.stash and session is not None:
        session.testscollected = config.stash[COLLECTED]


def pytest_sessionstart(session: pytest.Session) -> None:
    share = getattr(session.config, "workerinput", {}).get(SHARE)
    if share is not None:
        session.config.args = share


def arguments(config: pytest.Config) -> list[str]:
    """The files and tests that a run was asked for; a folder is all test files in it."""
    found: list[str] = []
    for argument in config.args:
        path = config.invocation_params.dir / argument
        if path.is_dir():
            found += sorted(file.relative_to(config.rootpath).as_posix() for file in path.rglob("test_*.py"))
        else:
            found.append(argument)
    return found


def shares(asked: Iterable[str], workers: int, duration: Callable[[str], float]) -> list[list[str]]:
    """Split files and tests (``path`` or ``path::name``) into one list for each worker; a file's tests stay together."""
    together: dict[str, list[str]] = {}
    for argument in asked:
        together.setdefault(argument.partition("::")[0], []).append(argument)
    measured = sorted(
        ((sum(map(duration, ids)), ids) for ids in together.values()), key=lambda file: -file[0]
    )
    loads: list[tuple[float, int]] = [(0.0, worker) for worker in range(workers)]
    split: list[list[str]] = [[] for _ in range(workers)]
    for seconds, ids in measured:
        load, worker = heapq.heappop(loads)
        split[worker] += ids
        heapq.heappush(loads, (load + seconds, worker))
    return split
