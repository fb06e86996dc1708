"""Run the cells of the matrix, or those whose names have a text in them, and write ``docs/reference/matrix.md``.

    python -m tests.matrix [TEXT] [--steps import tests/integration/lake]
    python -m tests.matrix --oldest

The results of cells and steps that are not run now are kept. ``--oldest`` is what CI runs: the steps of the oldest cell
that need no server. It writes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CalledProcessError

from tests.matrix.cells import (
    CELLS,
    INTEGRATION,
    OF_FOLDERS,
    OLDEST,
    ROOT,
    STEPS,
    WITHOUT_SERVERS,
    Cell,
    NotRun,
)

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "reference" / "matrix.md"
HEAD = """# Versions that were tested together

`make matrix` runs these cells, each in an environment of its own, with the packages that were there on its day, and
writes this page. Each step has the date on which it passed or failed, or the reason why it was not run.

"Lowest bounds": each package that ours needs has the lowest version that it takes, so the cell proves these bounds.
Its SQLAlchemy is 1.4, as in Airflow 3.1's own constraints.

Tests of newer features are skipped beside an older Airflow: policies of retries come with 3.3, commands of providers with
3.2. Assets of PostgreSQL tables come with version 7.0 of Airflow's provider of PostgreSQL. The tutorial shows the
output of Airflow 3.3.

PyIceberg's `SqlCatalog` needs SQLAlchemy 2. With 1.4, most tests of Iceberg tables use a catalog of their own, and those
that need `SqlCatalog` itself are skipped: the guide's, and those of other catalogs.

"""
OF_INTEGRATION = """
## Integration tests

`tests/integration` has a folder for each part of the package. Its tests run on real servers. Those that only a release
has to run are among them.

"""
Results = dict[str, dict[str, str]]
"""By cell and step: the outcome."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--oldest", action="store_true")
    asked = parser.parse_args()
    if asked.oldest:
        ran = [told for _, told in run(OLDEST, WITHOUT_SERVERS)]
        return any(not told.startswith("passed") for told in ran)
    ran = []
    for cell in CELLS:
        if asked.text in cell.name:
            for step, told in run(cell, [step for step in asked.steps if step in (cell.steps or STEPS)]):
                ran.append(told)
                keep(cell, step, told)
    return any(told.startswith("failed") for told in ran) or not ran


def keep(cell: Cell, step: str, told: str) -> None:
    """Store an outcome in the file of results, and write the page anew."""
    # Read the file as late as possible, because another process may have run other cells meanwhile.
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[cell.name] = {**results.get(cell.name, {}), step: told}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    PAGE.write_text(page(results))


def run(cell: Cell, steps: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Run the steps of a cell one after another. Yield the name and the outcome of each."""
    day = datetime.now(UTC).date().isoformat()
    for name in steps:
        print(f"{cell.name}: {name}", flush=True)
        try:
            counted = STEPS[name](cell)
        except NotRun as error:
            told = f"not run: {error}"
        except CalledProcessError:
            told = f"failed {day}"
        else:
            told = f"passed {day}" + (f": {counted}" if counted else "")
        yield name, told
        if name == "install" and not told.startswith("passed"):
            return


def page(results: Results) -> str:
    """Return the content of the page for these outcomes."""
    steps = [step for step in STEPS if step not in OF_FOLDERS]
    full = [cell for cell in CELLS if not cell.steps]
    return HEAD + _table(CELLS, steps, results) + OF_INTEGRATION + _table(full, list(OF_FOLDERS), results)


def _table(cells: Sequence[Cell], steps: Sequence[str], results: Results) -> str:
    names = [step.removeprefix(f"{INTEGRATION}/") for step in steps]
    columns = ("Python", "Airflow", "Spark", "Connect server", "PostgreSQL", "packages of", *names)
    rows = [columns, ("---",) * len(columns)]
    for cell in cells:
        told = results.get(cell.name, {})
        of_steps = [told.get(step, "not run" if step in (cell.steps or STEPS) else "") for step in steps]
        rows.append(
            (
                cell.python,
                cell.airflow,
                cell.spark,
                cell.server or cell.spark,
                cell.postgres,
                f"{cell.day}, lowest bounds" if cell.lowest else cell.day,
                *of_steps,
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
