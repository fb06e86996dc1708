"""Check that the library of a lake format is installed. A task needs it, and so does each executor of Spark."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from airflow_pgchange.errors import ExtraMissing


def require(library: str, *, format: str, extra: str, on_executors: str) -> None:
    """Raise ExtraMissing if this Python lacks the library of a format, or PyArrow. The error says what to install."""
    missing = next((name for name in (library, "pyarrow") if find_spec(name) is None), None)
    if missing is not None:
        raise ExtraMissing(
            f"results in {format} need {missing}: pip install 'airflow-provider-pgchange[{extra}]'. An executor of Spark "
            f"needs pip install {on_executors} alone, for the Python that runs there. This is {sys.executable}"
        )
