"""The format of Delta tables. Needs the extra ``delta``."""

from __future__ import annotations

from importlib.util import find_spec

from airflow_pgchange.errors import ExtraMissing

missing = next((name for name in ("deltalake", "pyarrow") if find_spec(name) is None), None)
if missing is not None:
    raise ExtraMissing(f"results in Delta need {missing}: pip install 'airflow-provider-pgchange[delta]'")

from airflow_pgchange.lake.delta.commits import commit  # noqa: E402
from airflow_pgchange.lake.delta.places import place  # noqa: E402

__all__ = ["commit", "place"]
