"""Running the tests against mutants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from tests.suite.mutants.choice import Jury
from tests.suite.mutants.mutant import Mutant
from tests.suite.mutants.state import Result, State
from tests.suite.mutants.tree import copied, mutated, run

_HOW = {"passed": "survived", "failed": "caught", "timeout": "timeout"}


@dataclass(frozen=True)
class Trial:
    """The tree whose mutants are tried, and how they are tried.

    ``jury`` chooses the tests for a mutant. The tests may take ``limit`` seconds.
    """

    root: Path
    python: Path
    state: State
    jury: Callable[[Mutant], Jury]
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
            _tell_red(trial, copies.get(), stop)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _try(trial: Trial, copy: Path, mutant: Mutant, stop: threading.Event) -> None:
    jury = trial.jury(mutant)
    with mutated(copy, mutant):
        outcome = run(copy, trial.python, jury.arguments, trial.limit, stop)
    # If the tests fail before any test begins, the first test counts as the one that caught the mutant.
    tests = [*jury.quick, *jury.rest]
    by = (outcome.by or tests[0]) if outcome.how == "failed" else ""
    quick = by.partition("[")[0] in jury.quick
    result = Result(mutant.id, _HOW[outcome.how], by, quick, len(tests), outcome.seconds)
    trial.state.keep(result)
    trial.tell(mutant, result)


def _tell_red(trial: Trial, copy: Path, stop: threading.Event) -> None:
    """Run all tests that caught a mutant without any mutant, because a test that fails then would catch everything."""
    state = trial.state
    caught = [result for result in state.results.values() if result.how == "caught"]
    while left := sorted({result.by for result in caught} - state.baseline.keys()):
        outcome = run(copy, trial.python, left, trial.limit * len(left), stop)
        if outcome.how == "failed" and outcome.by not in left:
            left, outcome = left[:1], run(copy, trial.python, left[:1], trial.limit, stop)
        for test in left if outcome.how == "passed" else [outcome.by or left[0]]:
            state.keep_baseline(test, outcome)
    for result in caught:
        if state.baseline[result.by].how != "passed":
            state.keep(replace(result, how="red"))
