"""Results in Iceberg tables whose catalog is in the database of the results: exactly once, because the table's new
snapshot and the consumer's progress are one commit of PostgreSQL. Needs the extra ``iceberg``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily
from airflow_pgchange.errors import ExtraMissing

if TYPE_CHECKING:
    from airflow_pgchange.lake.tables import Iceberg
    from airflow_pgchange.lake.writing import write
else:
    __getattr__, __dir__ = lazily(__name__, {"tables": ["Iceberg"], "writing": ["write"]})

__all__ = ["Iceberg", "write"]

# Only looked for: to import PyIceberg takes a second, and a DAG file that names a table needs none of it.
missing = next((name for name in ("pyiceberg", "pyarrow") if find_spec(name) is None), None)
if missing is not None:
    raise ExtraMissing(f"results in a lake need {missing}: pip install 'airflow-provider-pgchange[iceberg]'")
