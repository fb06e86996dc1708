"""The results of a run of mutants, by feed."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.suite.mutants.mutant import Mutant
from tests.suite.mutants.state import Result, State

COLUMNS = ("caught", "quick", "timeout", "survived", "equivalent", "red")


def equivalents(path: Path) -> dict[str, str]:
    """Return the mutants that no test can tell from the original, each with the reason."""
    listed = tomllib.loads(path.read_text()).get("mutant", [])
    return {entry["id"]: entry["reason"] for entry in listed}


def report(
    root: Path, mutants: Sequence[Mutant], state: State, equivalent: Mapping[str, str]
) -> Iterator[str]:
    """Yield counts by feed and by kind, and each survivor as a diff.

    ``quick`` counts the caught mutants that ``make check`` would have caught, too.
    """
    done = [(mutant, state.results[mutant.id]) for mutant in mutants if mutant.id in state.results]
    yield from _table("feed", [(mutant.feed, result) for mutant, result in done], equivalent)
    yield from _table("kind", [(mutant.kind, result) for mutant, result in done], equivalent)
    for mutant, result in done:
        how = _how(result, equivalent)
        if how == "survived":
            yield f"\n{mutant.id} {mutant.file}:{mutant.line} {mutant.place}: {mutant.kind}"
            yield mutant.diff((root / mutant.file).read_text())
            yield f"passed: {result.tests} tests"
        elif how == "equivalent":
            yield f"\n{mutant.id} {mutant.file}:{mutant.line} is equivalent: {equivalent[mutant.id]}"
    red = sorted(test for test, outcome in state.baseline.items() if outcome.how != "passed")
    if red:
        yield "\nfail without any mutant: " + " ".join(red)
    if len(done) < len(mutants):
        yield f"\n{len(mutants) - len(done)} are still to be tried"


def _table(title: str, results: Sequence[tuple[str, Result]], equivalent: Mapping[str, str]) -> Iterator[str]:
    counts = Counter((group, _how(result, equivalent)) for group, result in results)
    counts.update((group, "quick") for group, result in results if result.how == "caught" and result.quick)
    yield f"{title:<24}" + "".join(f"{column:>12}" for column in COLUMNS)
    for group in sorted({group for group, _ in counts}):
        yield f"{group:<24}" + "".join(f"{counts[group, column]:>12}" for column in COLUMNS)
    sums = [sum(number for (_, how), number in counts.items() if how == column) for column in COLUMNS]
    yield f"{'all':<24}" + "".join(f"{number:>12}" for number in sums)


def _how(result: Result, equivalent: Mapping[str, str]) -> str:
    return "equivalent" if result.how == "survived" and result.id in equivalent else result.how
