"""The costs of the tests: CPU seconds by test function, seconds by test, and the speed of the machine meanwhile."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from demo.postgres import Cluster
from tests.suite import budget, clusters, order
from tests.suite.servers import STARTED

SLOWEST = 20
SLOW = 5.0
"""A test that takes at least this number of seconds must say in its docstring why."""
BETWEEN = 20.0
"""Seconds between two measurements of the machine's speed."""
TICKS = os.sysconf("SC_CLK_TCK")


class Costs:
    """A plugin that measures costs in the processes that run tests, and reports them in the process that collects
    results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.cpu: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.yardsticks: list[float] = []
        self.unexplained: list[str] = []
        self._next_look = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._look()
        before = self._spent()
        result = yield
        path, name = item.nodeid.split("[")[0].split("::", 1)
        self.cpu[path][name] += self._spent() - before
        if self.seconds[item.nodeid] > SLOW and not getattr(item, "obj", item).__doc__:
            self.unexplained.append(item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Pass the measurements to the process that reports."""
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            cpu = {path: dict(functions) for path, functions in self.cpu.items()}
            output["costs"] = (cpu, self.yardsticks, self.unexplained)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        cpu, yardsticks, unexplained = getattr(node, "workeroutput", {}).get("costs", ({}, [], []))
        for path, functions in cpu.items():
            for name, seconds in functions.items():
                self.cpu[path][name] += seconds
        self.yardsticks += yardsticks
        self.unexplained += unexplained

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("slowest tests", sep="-")
        for name, seconds in sorted(self.seconds.items(), key=lambda one: -one[1])[:SLOWEST]:
            terminalreporter.line(f"{seconds:7.2f} s  {name}")
        for name in self.unexplained:
            terminalreporter.line(f"over {SLOW:.0f} s, and no docstring says why: {name}")
        order.note(self.config.rootpath, self.seconds, self.failed)
        path = self.config.getoption("--costs")
        if path is not None and self.yardsticks:
            wall: defaultdict[str, float] = defaultdict(float)
            for name, seconds in self.seconds.items():
                wall[name.split("::")[0]] += seconds
            spent = {"yardstick": statistics.median(self.yardsticks), "files": self.cpu, "wall": wall}
            path.write_text(json.dumps(spent))

    def _look(self) -> None:
        """Measure the machine's speed at intervals."""
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + BETWEEN
            self.yardsticks.append(budget.yardstick())

    def _spent(self) -> float:
        """CPU seconds of this process, of its children that have ended, and of the servers that tests share."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        servers = self.config.stash[STARTED].values()
        return sum(one.ru_utime + one.ru_stime for one in used) + sum(map(_server_spent, servers))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="the file for the costs of the tests")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config))


def _server_spent(server: Cluster) -> float:
    """CPU seconds of a server's first process, its ended sessions, and the session that makes databases."""
    with suppress(OSError, IndexError):
        first = (server.data / "postmaster.pid").read_text().split()[0]
        maker = str(clusters.maintenance_connection(server).info.backend_pid)
        return _process_spent(first) + _process_spent(maker)
    return 0.0


def _process_spent(pid: str) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / TICKS
