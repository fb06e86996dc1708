"""The order of tests: tests that failed last time, then the fastest, unless the command line has an order. And the
tests that are left to the release.

The results of the last runs are kept beside this checkout. If there are none yet, the recorded budget says which files
are expensive.
"""

from __future__ import annotations

import json
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.suite import budget, servers

LAST = Path(".cache/tests.json")
LEFT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--release", action="store_true", help="also run the tests that only a release runs")
    parser.addoption(
        "--tenth", metavar="SEED", help="run a random tenth of the tests, for instance beside other load"
    )
    parser.addoption(
        "--as-named", action="store_true", help="run the files in the order in which they are named"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "release(reason): only `make release-test` runs it, and why")
    config.stash[LEFT] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--release"):
        _leave_to_the_release(config, items)
    elsewhere = sum(servers.runs_elsewhere_too(item) for item in items)
    if elsewhere:
        config.stash[LEFT]["on the other server"] = elsewhere
    if (seed := config.getoption("--tenth")) is not None:
        _take_a_tenth(config, items, seed)
    if config.getoption("--as-named"):
        return
    seconds, failed = last(config.rootpath)
    dear = _seconds_of_files(config.rootpath, items, seconds)
    items.sort(key=lambda item: (item.nodeid not in failed, dear[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the tests that were left out to the process that reports, which collects no tests itself."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left"] = session.config.stash[LEFT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker has left out the same tests."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left = config.stash[LEFT]
    if left:
        terminalreporter.section(f"left to make release-test: {sum(left.values())} tests", sep="-")
        for reason, count in sorted(left.items(), key=lambda one: -one[1]):
            terminalreporter.line(f"{count:5}  {reason}")


def last(root: Path) -> tuple[dict[str, float], set[str]]:
    """Return the seconds of each test in its last run here, and the tests that failed."""
    try:
        held = json.loads((root / LAST).read_text())
    except (FileNotFoundError, ValueError):
        return {}, set()
    return held["seconds"], set(held["failed"])


def note(root: Path, seconds: dict[str, float], failed: set[str]) -> None:
    """Store the results of a run. Tests that did not run keep their earlier results."""
    before, failed_before = last(root)
    still = {name for name in failed_before if name not in seconds}
    (root / LAST).parent.mkdir(exist_ok=True)
    known = {"seconds": before | seconds, "failed": sorted(failed | still)}
    (root / LAST).write_text(json.dumps(known, indent=0, sort_keys=True))


def _leave_to_the_release(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left, reasons = [], [], Counter[str]()
    for item in items:
        marker = item.get_closest_marker("release")
        if marker is None:
            kept.append(item)
            continue
        if len(marker.args) != 1:
            raise pytest.UsageError(f"{item.nodeid}: the marker `release` needs one reason")
        left.append(item)
        reasons[marker.args[0]] += 1
    if left:
        config.stash[LEFT] |= reasons
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _take_a_tenth(config: pytest.Config, items: list[pytest.Item], seed: str) -> None:
    """Draw each test independently, so that workers with shares of the files need not agree."""
    taken = [item for item in items if zlib.crc32(f"{seed} {item.nodeid}".encode()) % 10 == 0]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(taken)])
    items[:] = taken


def _seconds_of_files(
    root: Path, items: Sequence[pytest.Item], seconds: dict[str, float]
) -> dict[Path, float]:
    """Return the mean seconds of a test of each file. Files stay together because their tests share fixtures."""
    found: defaultdict[Path, list[float]] = defaultdict(list)
    for item in items:
        if item.nodeid in seconds:
            found[item.path].append(seconds[item.nodeid])
    price = budget.prices(root)
    tests = Counter(item.path for item in items)
    return {
        path: statistics.mean(found[path])
        if found[path]
        else price(path.relative_to(root).as_posix()) / count
        for path, count in tests.items()
    }
