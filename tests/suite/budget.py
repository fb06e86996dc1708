"""What the tests may cost: CPU seconds, recorded in the repository, so that whoever makes them dearer says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path("tests/suite/budget.json")
MARGIN = 1.1
"""How many times its budget a run may cost."""
WORTH_NAMING = 2.0
"""CPU seconds that a file must have grown by to be named."""


@dataclass(frozen=True)
class Budget:
    """CPU seconds of a whole run and, as far as they can be told apart, of each file.

    They are of a machine that does a fixed piece of work in ``yardstick`` of them.
    """

    yardstick: float
    total: float
    files: Mapping[str, float]

    def on(self, other: Budget) -> Budget:
        """What this would have been on the machine of another."""
        factor = other.yardstick / self.yardstick
        files = {path: seconds * factor for path, seconds in self.files.items()}
        return Budget(other.yardstick, self.total * factor, files)


def recorded(root: Path) -> Budget | None:
    path = root / FILE
    return Budget(**json.loads(path.read_text())) if path.exists() else None


def record(root: Path, spent: Budget) -> None:
    files = {path: round(seconds, 2) for path, seconds in sorted(spent.files.items())}
    kept = Budget(round(spent.yardstick, 5), round(spent.total, 1), files)
    (root / FILE).write_text(json.dumps(asdict(kept), indent=1) + "\n")


def excess(spent: Budget, allowed: Budget) -> list[str]:
    """What to say of a run that cost more than it may; nothing of one that did not."""
    here = spent.on(allowed)
    if here.total <= allowed.total * MARGIN:
        return []
    grown = {path: seconds - allowed.files.get(path, 0.0) for path, seconds in here.files.items()}
    dearest = sorted(grown.items(), key=lambda one: -one[1])
    return [
        f"the tests cost {here.total:.0f} CPU seconds, more than a tenth over their budget of {allowed.total:.0f}:",
        *(f"  {more:+7.1f}  {path}" for path, more in dearest if more > WORTH_NAMING),
        "make them cheaper, or raise the budget in the same commit: make test BUDGET=record",
    ]
