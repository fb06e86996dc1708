"""The inner loop: lint what changed, and run the tests that it concerns. ``python -m tests.suite.check --help``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.suite import budget
from tests.suite.choosing.changes import Change, changes
from tests.suite.choosing.concern import Concern, concerned
from tests.suite.choosing.feeds import FEEDS, of_feed
from tests.suite.choosing.graph import read_graph
from tests.suite.choosing.ranking import Choice, within
from tests.suite.run import ROOT, environment

WORKERS = 2
SECONDS, FEED_SECONDS = 50, 110
"""Seconds of each worker for the tests of a change, and of a feed. A run takes 30 more, because the repository is read,
servers start, and tests are collected."""


@dataclass(frozen=True)
class Plan:
    """The changes, the tests to run, and the tests that are left to a release. Also the tests and kinds of tests that
    are left to ``make test`` for lack of time."""

    changed: Sequence[Change]
    chosen: Sequence[Choice]
    left: Sequence[Choice]
    skipped: Sequence[str]
    of_a_release: Sequence[Choice]


def main() -> int:
    began = time.monotonic()
    arguments = _arguments()
    plan = _plan(arguments)
    _tell(plan)
    failed = [*_lint(plan.changed), *_test(plan)]
    if plan.left:
        print(f"left to make test for want of time: {len(plan.left)} tests that reach the change, too")
    if plan.skipped and plan.chosen:
        print(
            f"left to make test because the change is not about them: tests marked {', '.join(plan.skipped)}"
        )
    if plan.of_a_release:
        tests = " ".join(choice.test for choice in plan.of_a_release)
        print(f"left to make release-test, and reach the change: pytest --release {tests}")
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'passed'}, in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.suite.check", description=__doc__)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="treat these files as changed; default: those that git reports",
    )
    parser.add_argument("--feed", choices=FEEDS, help="every unit and integration test of a feed")
    parser.add_argument("--seconds", type=float, help="seconds that the tests may take")
    parser.add_argument(
        "--base",
        help="the revision to compare with; default: the last commit that this branch shares with main",
    )
    return parser.parse_args()


def _plan(arguments: argparse.Namespace) -> Plan:
    changed = [Change(path) for path in arguments.paths] or changes(ROOT, arguments.base)
    graph = read_graph(ROOT)
    if arguments.feed:
        concern, seconds = Concern(of_feed(graph, arguments.feed), [], []), FEED_SECONDS
    else:
        concern, seconds = concerned(graph, changed), SECONDS
    chosen, left = within(
        concern.tests, (arguments.seconds or seconds) * WORKERS * _speed(), budget.durations(ROOT)
    )
    return Plan(changed, chosen, left, concern.unneeded, concern.of_a_release)


def _speed() -> float:
    """Return how many times faster this machine is than the machine of the recorded costs."""
    return budget.recorded(ROOT).yardstick / min(budget.yardstick() for _ in range(3))


def _tell(plan: Plan) -> None:
    for change in plan.changed:
        print(f"changed  {change.path}" + (f" ({len(change.lines)} lines)" if change.lines else ""))
    files: dict[str, list[Choice]] = {}
    for choice in plan.chosen:
        files.setdefault(choice.path, []).append(choice)
    for path, choices in files.items():
        print(f"runs     {len(choices):3} of {path}; the first {choices[0].why}")
    sys.stdout.flush()


def _lint(changed: Sequence[Change]) -> list[str]:
    """Run the linters on the changes, and return those that fail."""
    files = [
        change.path for change in changed if change.path.endswith(".py") and (ROOT / change.path).exists()
    ]
    commands = []
    if files:
        commands += [
            ("ruff check", ["ruff", "check", *files]),
            ("ruff format", ["ruff", "format", "--check", *files]),
        ]
    if any(path.startswith("airflow_pgchange/") for path in files):
        commands.append(("mypy", ["mypy"]))
    return [name for name, command in commands if _run(command)]


def _test(plan: Plan) -> list[str]:
    if not plan.chosen:
        print("no test concerns this")
        return []
    tests = [choice.test for choice in plan.chosen]
    split = ["-n", str(WORKERS), "--dist", "each", "--max-worker-restart", "0"]
    return ["pytest"] if _run(["pytest", "-q", *split, *tests]) else []


def _run(command: Sequence[str]) -> int:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment(), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
