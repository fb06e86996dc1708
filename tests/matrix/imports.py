"""Import every module of the package, and serialise every example DAG, as ``python -m tests.matrix.imports [dags]``.

It prints what fails, and ends with 1 if anything does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

from tests.airflow_home import DAGS, prepare


def unimported() -> Iterator[str]:
    """Yield the error of each module that cannot be imported. An extra that is not installed is no error."""
    import airflow_pgchange
    from airflow_pgchange.errors import ExtraMissing

    # The walk itself imports the packages, and reports here those that fail.
    failed: list[str] = []
    names = [
        each.name for each in walk_packages(airflow_pgchange.__path__, "airflow_pgchange.", failed.append)
    ]
    for name in names:
        try:
            import_module(name)
        except ExtraMissing:
            continue
        except Exception as error:  # noqa: BLE001
            yield f"{name}: {type(error).__name__}: {error}"


def unserialised() -> Iterator[str]:
    """Yield the error of each DAG file that cannot be imported, and of each DAG that Airflow cannot store."""
    from airflow_pgchange.utils.compat import dag_bag, dag_serialization

    bag = dag_bag(DAGS, DAGS)
    yield from (f"{Path(file).name}: {error}" for file, error in bag.import_errors.items())
    if not bag.dags:
        yield f"no DAG is in {DAGS}"
    for dag_id, dag in bag.dags.items():
        try:
            dag_serialization().to_dict(dag)
        except Exception as error:  # noqa: BLE001
            yield f"{dag_id}: {type(error).__name__}: {error}"


if __name__ == "__main__":
    prepare()
    errors = list(unserialised() if "dags" in sys.argv else unimported())
    print(*errors, sep="\n")
    sys.exit(1 if errors else 0)
