"""What a run of mutants has come to, feed by feed."""

from __future__ import annotations

import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.suite.mutants.mutant import Mutant
from tests.suite.mutants.state import Result, State

HOWS = ("caught", "timeout", "survived", "equivalent", "red")


def equivalents(path: Path) -> dict[str, str]:
    """The mutants that no test can tell from the original, and why."""
    listed = tomllib.loads(path.read_text()).get("mutant", [])
    return {entry["id"]: entry["reason"] for entry in listed}


def report(
    root: Path, mutants: Sequence[Mutant], state: State, equivalent: Mapping[str, str]
) -> Iterator[str]:
    """Counts by feed, and each survivor as a diff with the files that let it pass."""
    done = [(mutant, state.results[mutant.id]) for mutant in mutants if mutant.id in state.results]
    counts = Counter((mutant.feed, _how(result, equivalent)) for mutant, result in done)
    yield f"{'feed':<16}" + "".join(f"{how:>12}" for how in HOWS)
    for feed in sorted({feed for feed, _ in counts}):
        yield f"{feed:<16}" + "".join(f"{counts[feed, how]:>12}" for how in HOWS)
    yield f"{'all':<16}" + "".join(
        f"{sum(n for (_, h), n in counts.items() if h == how):>12}" for how in HOWS
    )
    for mutant, result in done:
        how = _how(result, equivalent)
        if how == "survived":
            yield f"\n{mutant.id} {mutant.file}:{mutant.line} {mutant.place}: {mutant.kind}"
            yield mutant.diff((root / mutant.file).read_text())
            yield "passed: " + shlex.join(result.files)
        elif how == "equivalent":
            yield f"\n{mutant.id} {mutant.file}:{mutant.line} is equivalent: {equivalent[mutant.id]}"
    red = sorted(test for test, outcome in state.baseline.items() if outcome.how != "passed")
    if red:
        yield "\nfail without any mutant: " + " ".join(red)
    if len(done) < len(mutants):
        yield f"\n{len(mutants) - len(done)} are still to be tried"


def _how(result: Result, equivalent: Mapping[str, str]) -> str:
    return "equivalent" if result.how == "survived" and result.id in equivalent else result.how
