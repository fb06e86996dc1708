"""``make test``: every promise once, within a budget.

What it leaves to ``make release-test`` it says at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.suite import budget, processes
from tests.suite.budget import Budget

ROOT = Path(__file__).parents[2]
WORKERS = "3"
"""On two cores: some tests wait for what they started."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite.run", description=__doc__)
    parser.add_argument("--servers", default="shared", help="which PostgreSQL each test runs on")
    parser.add_argument("--record", action="store_true", help="record what the tests cost as their budget")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="pgchange-") as folder:
        costs = Path(folder, "costs.json")
        ended = processes.run(
            [
                *(sys.executable, "-m", "pytest", "tests", "-q", "-n", WORKERS),
                *("--dist", "load", "--maxschedchunk", "4", "--servers", options.servers),
                *("--costs", str(costs), *arguments),
            ],
            environment(),
            ROOT,
        )
        spent = Budget(total=ended.cpu, **json.loads(costs.read_text())) if costs.exists() else None
    print(
        f"{ended.wall:.0f} s, {ended.cpu:.0f} CPU seconds; each common test ran on one of two servers: OTHER=1 swaps them"
    )
    for command in ended.left:
        print(f"still ran, and was killed: {command}")
    if ended.code or ended.left or spent is None:
        return ended.code or 1
    if options.record:
        budget.record(ROOT, spent)
        return 0
    allowed = budget.recorded(ROOT)
    complaint = budget.excess(spent, allowed) if allowed is not None and not arguments else []
    print(*complaint, sep="\n", end="\n" if complaint else "")
    return 1 if complaint else 0


def environment() -> dict[str, str]:
    """Bytecode is kept: each worker, and each process that a test starts, would compile Airflow and the tests anew."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    sys.exit(main())
