"""The modules of the package that need an extra."""

from __future__ import annotations

EXTRAS = {
    "delta": {"airflow_pgchange.lake.delta"},
    "http": {"airflow_pgchange.events.http", "airflow_pgchange.events.webhooks"},
    "iceberg": {
        "airflow_pgchange.lake.arrow",
        "airflow_pgchange.lake.iceberg",
        "airflow_pgchange.lake.keys",
        "airflow_pgchange.lake.copy_on_write",
        "airflow_pgchange.lake.rows",
        "airflow_pgchange.lake.writing",
    },
    "openlineage": {"airflow_pgchange.utils.openlineage"},
    "spark": {
        "airflow_pgchange.decorators.spark",
        "airflow_pgchange.operators.spark",
        "airflow_pgchange.operators.spark_arguments",
        "airflow_pgchange.operators.spark_detached",
        "airflow_pgchange.operators.spark_connect",
        "airflow_pgchange.operators.spark_submission",
        "airflow_pgchange.spark",
        "airflow_pgchange.testing.spark",
    },
}
"""All other modules can be imported with Airflow alone."""
