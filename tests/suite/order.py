"""In which order tests run: those that failed last time, then the fastest; and which are left to the release.

What the last runs in this checkout saw is kept beside it, and where nothing is yet, the recorded budget tells which files
are dear.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.suite import budget

LAST = Path(".cache/tests.json")
LEFT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--release", action="store_true", help="run what is left to the release, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "release(reason): only `make release-test` runs it, and why")
    config.stash[LEFT] = Counter()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--release"):
        _leave_to_the_release(config, items)
    seconds, failed = last(config.rootpath)
    dear = _seconds_of_files(config.rootpath, items, seconds)
    items.sort(key=lambda item: (item.nodeid not in failed, dear[item.path]))


def last(root: Path) -> tuple[dict[str, float], set[str]]:
    """The seconds of each test when it last ran here, and those that failed."""
    try:
        held = json.loads((root / LAST).read_text())
    except (FileNotFoundError, ValueError):
        return {}, set()
    return held["seconds"], set(held["failed"])


def note(root: Path, seconds: dict[str, float], failed: set[str]) -> None:
    """Keep what a run saw; of tests that did not run, what was known of them."""
    before, failed_before = last(root)
    still = {name for name in failed_before if name not in seconds}
    (root / LAST).parent.mkdir(exist_ok=True)
    known = {"seconds": before | seconds, "failed": sorted(failed | still)}
    (root / LAST).write_text(json.dumps(known, indent=0, sort_keys=True))


def _leave_to_the_release(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if item.get_closest_marker("release")]
    for item in left:
        marker = item.get_closest_marker("release")
        if marker is None or len(marker.args) != 1:
            raise pytest.UsageError(f"{item.nodeid}: the marker `release` wants one reason")
        config.stash[LEFT][marker.args[0]] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def _seconds_of_files(
    root: Path, items: Sequence[pytest.Item], seconds: dict[str, float]
) -> dict[Path, float]:
    """Of a test of each file, on average; files stay together, as their tests share what is dear to make."""
    found: defaultdict[Path, list[float]] = defaultdict(list)
    for item in items:
        if item.nodeid in seconds:
            found[item.path].append(seconds[item.nodeid])
    allowed = budget.recorded(root)
    files = {} if allowed is None else allowed.files
    tests = Counter(item.path for item in items)
    return {
        path: statistics.mean(found[path])
        if found[path]
        else files.get(path.relative_to(root).as_posix(), 0.0) / count
        for path, count in tests.items()
    }
