"""The format of Iceberg tables. Needs the extra ``iceberg``."""

from __future__ import annotations

from importlib.util import find_spec

from airflow_pgchange.errors import ExtraMissing

missing = next((name for name in ("pyiceberg", "pyarrow") if find_spec(name) is None), None)
if missing is not None:
    raise ExtraMissing(f"results in Iceberg need {missing}: pip install 'airflow-provider-pgchange[iceberg]'")

from airflow_pgchange.lake.iceberg.commits import commit  # noqa: E402
from airflow_pgchange.lake.iceberg.places import place  # noqa: E402

__all__ = ["commit", "place"]
