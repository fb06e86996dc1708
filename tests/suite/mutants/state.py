"""The results of runs, a line for each mutant, so that another run continues from there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.suite.mutants.tree import Outcome


@dataclass(frozen=True)
class Result:
    """The result of a mutant: ``caught``, ``survived``, ``timeout`` or ``red``.

    A mutant is ``red`` if the test that caught it also fails without the mutant. ``quick`` says that ``make check``
    would have run that test. ``tests`` is the number of chosen tests.
    """

    id: str
    how: str
    by: str
    quick: bool
    tests: int
    seconds: float


@dataclass(frozen=True)
class State:
    """The results of one tree, and how the tests that caught mutants end without a mutant."""

    path: Path
    results: dict[str, Result] = field(default_factory=dict)
    baseline: dict[str, Outcome] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def read(cls, path: Path) -> State:
        state = cls(path)
        for line in _lines(path):
            if "test" in line:
                test = line.pop("test")
                state.baseline[test] = Outcome(**line)
            else:
                state.results[line["id"]] = Result(**line)
        return state

    def keep(self, result: Result) -> None:
        self.results[result.id] = result
        self._append(asdict(result))

    def keep_baseline(self, test: str, outcome: Outcome) -> None:
        self.baseline[test] = outcome
        self._append({"test": test, **asdict(outcome)})

    def _append(self, line: dict[str, Any]) -> None:
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def survivors(folder: Path) -> set[str]:
    """Return the mutants that survived their last run, in any tree."""
    last: dict[str, Result] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        last |= State.read(path).results
    return {mark for mark, result in last.items() if result.how == "survived"}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of a file, without a last line that is incomplete because its run was stopped."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
