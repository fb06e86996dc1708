"""Which test files a mutant has to get past."""

from __future__ import annotations

import re
from pathlib import Path

from tests.suite.mutants.mutant import Mutant

_FOLDERS = ("tests/unit", "tests/integration")
_COST = 10.0


def chosen(root: Path, mutant: Mutant, seconds: float) -> list[str]:
    """The test files that most likely notice a change of this place, as many as are run in so many seconds."""
    name = mutant.place.split(".")[-1]
    module = Path(mutant.file).stem.lstrip("0123456789_")
    scores: dict[str, int] = {}
    for folder in _FOLDERS:
        for path in (root / folder).glob("test_*.py"):
            words = re.findall(r"\w+", path.read_text())
            score = 10 * words.count(name) + words.count(module) + words.count(mutant.feed)
            if score:
                scores[str(path.relative_to(root))] = score
    best = sorted(scores, key=lambda file: (-scores[file], file))
    return best[: max(1, int(seconds / _COST))]
