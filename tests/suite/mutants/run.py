"""Running the tests against mutants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.suite.mutants.mutant import Mutant
from tests.suite.mutants.state import Result, State
from tests.suite.mutants.tree import copied, mutated, run

_HOW = {"passed": "survived", "failed": "caught", "timeout": "timeout"}
_BASELINE_LIMIT = 900.0


@dataclass(frozen=True)
class Trial:
    """A tree to try mutants of, and how: ``chosen`` tells the test files for each."""

    root: Path
    python: Path
    state: State
    chosen: Callable[[Mutant], list[str]]
    tell: Callable[[Mutant, Result], None]


def try_all(trial: Trial, mutants: Sequence[Mutant], workers: int) -> None:
    """Try each mutant, in copies of the tree beside each other."""
    stop = threading.Event()
    copies: SimpleQueue[Path] = SimpleQueue()

    def attempt(mutant: Mutant) -> None:
        copy = copies.get()
        try:
            _try(trial, copy, mutant, stop)
        finally:
            copies.put(copy)

    with ExitStack() as opened:
        for _ in range(workers):
            copies.put(opened.enter_context(copied(trial.root)))
        pool = opened.enter_context(ThreadPoolExecutor(workers))
        attempts = [pool.submit(attempt, mutant) for mutant in mutants]
        try:
            for done in as_completed(attempts):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _try(trial: Trial, copy: Path, mutant: Mutant, stop: threading.Event) -> None:
    files = trial.chosen(mutant)
    passing = [file for file in files if _passes(trial, copy, file, stop)]
    result = Result(mutant.id, "red", "", tuple(files), 0.0)
    if passing:
        limit = 30 + 3 * sum(trial.state.baseline[file].seconds for file in passing)
        with mutated(copy, mutant):
            outcome = run(copy, trial.python, passing, limit, stop)
        result = Result(mutant.id, _HOW[outcome.how], outcome.by, tuple(passing), outcome.seconds)
    trial.state.keep(result)
    trial.tell(mutant, result)


def _passes(trial: Trial, copy: Path, file: str, stop: threading.Event) -> bool:
    """Whether a test file passes without any mutant: else it would catch all of them."""
    if file not in trial.state.baseline:
        trial.state.keep_baseline(file, run(copy, trial.python, [file], _BASELINE_LIMIT, stop))
    return trial.state.baseline[file].how == "passed"
