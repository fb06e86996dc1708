"""What runs inside Spark: the data source, the staging sink and the job's API. Feeds only, no Airflow. Needs the extra
``spark``."""

from __future__ import annotations

from importlib.util import find_spec

from airflow_pgchange.feeds.errors import ExtraMissing

NEEDED = ("pyspark", "pyarrow", "adbc_driver_postgresql")

# Only looked for: to import them takes seconds, and who submits a batch uses none of them.
missing = next((name for name in NEEDED if find_spec(name) is None), None)
if missing is not None:
    raise ExtraMissing(f"batches in Spark need {missing}: pip install 'airflow-provider-pgchange[spark]'")
