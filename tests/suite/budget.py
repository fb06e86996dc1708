"""The budget of the tests: the CPU seconds that all of them may use, and what each file used when it was last recorded.

``make test`` fails when the tests use more than ``allowed``, and when a test file is not recorded. ``allowed`` is not
raised: a change that adds seconds removes as many elsewhere.
"""

from __future__ import annotations

import functools
import json
import re
import resource
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path("tests/suite/budget.json")
WORTH_NAMING = 2.0
"""A file is reported if it has grown by at least this number of CPU seconds."""
DEAR = 1.0
"""A test function with at least this number of CPU seconds is recorded separately."""
A_TEST, A_CAMPAIGN = 0.2, 10.0
"""Estimates for files without a recorded cost: CPU seconds of an ordinary test, and of a test in `system` or `chaos`."""
QUICK = ("tests/unit/", "tests/integration/")
RELEASE = "\npytestmark = pytest.mark.release("
TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


@dataclass(frozen=True)
class FileCost:
    """CPU seconds of a test file, of its expensive test functions (with all their parameters), and of each other
    function. ``wall`` are the seconds that the file took beside two other workers."""

    total: float
    wall: float
    each: float
    dear: Mapping[str, float]

    @classmethod
    def of(cls, functions: Mapping[str, float], wall: float) -> FileCost:
        """Sum up the CPU seconds of a file's test functions, by name."""
        dear = {name: round(seconds, 2) for name, seconds in functions.items() if seconds >= DEAR}
        others = [seconds for seconds in functions.values() if seconds < DEAR]
        each = sum(others) / len(others) if others else 0.0
        total = round(sum(functions.values()), 2)
        return cls(total, round(wall, 1), round(each, 3), dict(sorted(dear.items())))


@dataclass(frozen=True)
class Budget:
    """Recorded costs, on a machine that does a fixed piece of work in ``yardstick`` CPU seconds."""

    yardstick: float
    allowed: float
    files: Mapping[str, FileCost]


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a run and of each test function, and the seconds that each file took."""

    yardstick: float
    total: float
    files: Mapping[str, Mapping[str, float]]
    wall: Mapping[str, float]

    def on(self, yardstick: float) -> Spent:
        """Convert the costs to the speed of another machine."""
        factor = yardstick / self.yardstick
        files = {
            path: {name: seconds * factor for name, seconds in functions.items()}
            for path, functions in self.files.items()
        }
        wall = {path: seconds * factor for path, seconds in self.wall.items()}
        return Spent(yardstick, self.total * factor, files, wall)


def yardstick() -> float:
    """Return the CPU seconds that a fixed piece of work takes here and now: they tell how fast the machine is.

    Half of the work is computing and half is starting processes, as in the tests. Computing alone got 1.4 times as fast
    from one machine to another on which the tests got 1.17 times as fast.
    """
    before = _cpu()
    sum(number * number for number in range(300_000))
    for _ in range(16):
        subprocess.run(["true"], check=True)
    return _cpu() - before


def _cpu() -> float:
    """Return the CPU seconds of this thread and of processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_THREAD, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def recorded(root: Path) -> Budget:
    held = json.loads((root / FILE).read_text())
    files = {path: FileCost(**cost) for path, cost in held["files"].items()}
    return Budget(held["yardstick"], held["allowed"], files)


def record(root: Path, spent: Spent) -> None:
    """Record the files that ran, keep those that did not and still exist, and leave ``allowed`` as it is."""
    before = recorded(root)
    here = spent.on(before.yardstick)
    kept = {path: cost for path, cost in before.files.items() if (root / path).exists()}
    files = kept | {path: FileCost.of(functions, here.wall[path]) for path, functions in here.files.items()}
    text = json.dumps(asdict(Budget(before.yardstick, before.allowed, dict(sorted(files.items())))), indent=1)
    (root / FILE).write_text(_a_line_for_each_file(text) + "\n")


def _a_line_for_each_file(text: str) -> str:
    """Join lines that are indented by more than a file's path, so that a change of a file is a change of a line."""
    return re.sub(r"\n {3,}|\n {2}(?=\})", " ", text)


def unrecorded(root: Path) -> list[str]:
    """Describe test files that have no budget; empty if there are none."""
    files = recorded(root).files
    missing = [path for path in _test_files(root) if path not in files]
    return [f"{path} has no budget; record it: make test RECORD={path}" for path in missing]


def _test_files(root: Path) -> list[str]:
    """Return the test files that ``make test`` runs, without files that run only in a release."""
    found = [path for path in (root / "tests").rglob("test_*.py") if RELEASE not in path.read_text()]
    return sorted(path.relative_to(root).as_posix() for path in found)


def excess(spent: Spent, allowed: Budget) -> list[str]:
    """Describe by how much a run exceeds its budget, and which files grew; empty if it does not."""
    here = spent.on(allowed.yardstick)
    if here.total <= allowed.allowed:
        return []
    before = {path: cost.total for path, cost in allowed.files.items()}
    grown = {path: sum(functions.values()) - before.get(path, 0.0) for path, functions in here.files.items()}
    dearest = sorted(grown.items(), key=lambda file: -file[1])
    return [
        f"the tests used {here.total:.0f} CPU seconds, more than their budget of {allowed.allowed:.0f}:",
        *(f"  {more:+7.1f}  {path}" for path, more in dearest if more > WORTH_NAMING),
        "make them cheaper, or remove as many seconds elsewhere",
    ]


def _costs(root: Path) -> Mapping[str, FileCost]:
    """Return the recorded costs of the test files. Return nothing in a checkout without a budget."""
    return recorded(root).files if (root / FILE).exists() else {}


def durations(root: Path) -> Callable[[str], float]:
    """Return a function for the seconds that a test file, or a test in it, takes in a run."""
    files, price = _costs(root), prices(root)

    def duration(test: str) -> float:
        cost = files.get(test.partition("::")[0])
        if cost is None or cost.total == 0:
            return price(test)
        return price(test) * cost.wall / cost.total

    return duration


def prices(root: Path) -> Callable[[str], float]:
    """Return a function for the CPU seconds of a test file (``path``) or of a test function (``path::name``)."""
    files = _costs(root)

    @functools.cache
    def price(test: str) -> float:
        path, _, name = test.partition("::")
        cost = files.get(path)
        if cost is None:
            guess = A_TEST if path.startswith(QUICK) else A_CAMPAIGN
            return guess if name else guess * len(TEST.findall((root / path).read_text()))
        return cost.dear.get(name, cost.each) if name else cost.total

    return price
