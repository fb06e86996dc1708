"""The code that runs inside Spark: the data source, the staging sink and the job's API. It needs no Airflow, but the
extra ``spark``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily
from airflow_pgchange.errors import ExtraMissing

if TYPE_CHECKING:
    from airflow_pgchange.spark.entry_point import batch_job, batch_jobs
    from airflow_pgchange.spark.job import Job
else:
    __getattr__, __dir__ = lazily(__name__, {"entry_point": ["batch_job", "batch_jobs"], "job": ["Job"]})

__all__ = ["Job", "batch_job", "batch_jobs"]

NEEDED = ("pyspark", "pyarrow", "adbc_driver_postgresql")

# Look for the packages without importing them. The imports take seconds, and the process that submits a batch needs none.
missing = next((name for name in NEEDED if find_spec(name) is None), None)
if missing is not None:
    raise ExtraMissing(f"batches in Spark need {missing}: pip install 'airflow-provider-pgchange[spark]'")
