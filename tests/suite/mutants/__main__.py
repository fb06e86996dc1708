"""python -m tests.suite.mutants: plant faults in the code, one at a time, and see which tests notice."""

from __future__ import annotations

import argparse
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.suite.mutants.choice import jury
from tests.suite.mutants.mutant import Mutant
from tests.suite.mutants.report import equivalents, report
from tests.suite.mutants.run import Trial, try_all
from tests.suite.mutants.sample import possible, sample
from tests.suite.mutants.state import Result, State, survivors
from tests.suite.mutants.tree import digest

ROOT = Path(__file__).parent.parent.parent.parent
STATES = ROOT / ".cache" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


def main() -> None:
    wanted = _arguments()
    every = [
        m for m in possible(ROOT, wanted.only) if not wanted.kind or m.kind.replace(" ", "-") == wanted.kind
    ]
    mutants = _selected(every, wanted)
    if wanted.list:
        _list(every, mutants)
        return
    state = State.read(wanted.state or STATES / f"{digest(ROOT)}-{wanted.seed}.jsonl")
    afresh = wanted.again or wanted.survivors
    waiting = [mutant for mutant in mutants if afresh or mutant.id not in state.results]
    print(
        f"{len(mutants)} mutants of {len(every)}, {len(waiting)} to try; results in {state.path}", flush=True
    )
    trial = Trial(
        ROOT,
        ROOT / ".venv" / "bin" / "python",
        state,
        lambda mutant: jury(ROOT, mutant, wanted.seconds),
        _tell,
        60 + 10 * wanted.seconds,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try_all(trial, waiting, wanted.workers)
    except KeyboardInterrupt:
        raise SystemExit("stopped: the next run continues from here") from None
    finally:
        print("", *report(ROOT, mutants, state, equivalents(EQUIVALENT)), sep="\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.suite.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=7, help="the seed of the sample")
    parser.add_argument("--count", type=int, default=200, help="how many mutants to try")
    parser.add_argument(
        "--only", default="*", metavar="GLOB", help="only mutants of the files that match this pattern"
    )
    parser.add_argument("--kind", help="only mutants of this kind, such as drop-lock; --list shows the kinds")
    parser.add_argument("--list", action="store_true", help="print the sample, and try nothing")
    parser.add_argument(
        "--seconds", type=float, default=100, help="seconds for the tests that run first, as in make check"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="number of copies of the tree in which mutants are tried at once",
    )
    parser.add_argument("--state", type=Path, help="the file of results")
    parser.add_argument(
        "--again", action="append", metavar="ID", help="try this mutant again, even if it has a result"
    )
    parser.add_argument(
        "--survivors", action="store_true", help="try the mutants that survived, in this tree or another"
    )
    return parser.parse_args()


def _selected(every: Sequence[Mutant], wanted: argparse.Namespace) -> list[Mutant]:
    if wanted.again or wanted.survivors:
        ids = set(wanted.again or survivors(STATES))
        return [mutant for mutant in every if mutant.id in ids]
    return sample(every, wanted.seed, wanted.count)


def _list(every: Sequence[Mutant], mutants: Sequence[Mutant]) -> None:
    for mutant in mutants:
        print(f"{mutant.id} {mutant.file}:{mutant.line} {mutant.place}: {mutant.kind}")
    print(f"\n{len(mutants)} of {len(every)}:")
    for (language, kind), count in sorted(Counter((_language(m), m.kind) for m in every).items()):
        print(f"{count:>6} {language} {kind}")


def _language(mutant: Mutant) -> str:
    return Path(mutant.file).suffix.lstrip(".")


def _tell(mutant: Mutant, result: Result) -> None:
    told = f"{result.how:<9} {mutant.id} {mutant.file}:{mutant.line} {mutant.kind}"
    print(f"{told}, by {result.by}" if result.by else told, flush=True)


if __name__ == "__main__":
    main()
