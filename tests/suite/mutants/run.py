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


@dataclass(frozen=True)
class Trial:
    """A tree to try mutants of, and how: ``chosen`` tells the test files for each, which may take ``limit`` seconds."""

    root: Path
    python: Path
    state: State
    chosen: Callable[[Mutant], list[str]]
    tell: Callable[[Mutant, Result], None]
    limit: float


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
    with mutated(copy, mutant):
        outcome = run(copy, trial.python, files, trial.limit, stop)
    how = _HOW[outcome.how]
    if how == "caught" and not _passes(trial, copy, outcome.by, stop):
        how = "red"
    result = Result(mutant.id, how, outcome.by, tuple(files), outcome.seconds)
    trial.state.keep(result)
    trial.tell(mutant, result)


def _passes(trial: Trial, copy: Path, test: str, stop: threading.Event) -> bool:
    """Whether a test passes without any mutant: else it would catch all of them."""
    if test not in trial.state.baseline:
        trial.state.keep_baseline(test, run(copy, trial.python, [test], trial.limit, stop))
    return trial.state.baseline[test].how == "passed"
