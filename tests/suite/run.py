"""``make test``: every promise once, within a budget of CPU seconds.

At its end it lists the tests that it leaves to ``make release-test``, with their reasons.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.suite import budget, processes
from tests.suite.budget import Spent

ROOT = Path(__file__).parents[2]
SPLIT = ("-n", "3", "--dist", "each", "--max-worker-restart", "0")
"""Three workers on two cores, because some tests wait for processes that they started; each has a share of the files."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite.run", description=__doc__)
    parser.add_argument("--servers", default="shared", help="the PostgreSQL server of each test")
    parser.add_argument("--record", action="store_true", help="record the costs of the tests that ran")
    options, arguments = parser.parse_known_args()
    if not options.record and not arguments and (complaint := budget.unrecorded(ROOT)):
        print(*complaint, sep="\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="pgchange-") as folder:
        costs = Path(folder, "costs.json")
        tests = [] if any(not argument.startswith("-") for argument in arguments) else ["tests"]
        command = [sys.executable, "-m", "pytest", *tests, "-q", *SPLIT, "--servers", options.servers]
        ended = processes.run([*command, "--costs", str(costs), *arguments], environment(), ROOT)
        spent = Spent(total=ended.cpu, **json.loads(costs.read_text())) if costs.exists() else None
    print(
        f"{ended.wall:.0f} s, {ended.cpu:.0f} CPU seconds, yardstick {spent.yardstick if spent else 0:.4f}; "
        "each test ran on one of two servers: OTHER=1 swaps them"
    )
    for command_line in ended.left:
        print(f"still ran, and was killed: {command_line}")
    if ended.code or ended.left or spent is None:
        return ended.code or 1
    if options.record:
        budget.record(ROOT, spent)
        return 0
    complaint = [] if arguments else budget.excess(spent, budget.recorded(ROOT))
    print(*complaint, sep="\n", end="\n" if complaint else "")
    return 1 if complaint else 0


def environment() -> dict[str, str]:
    """Bytecode is kept: each worker, and each process that a test starts, would compile Airflow and the tests anew."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    sys.exit(main())
