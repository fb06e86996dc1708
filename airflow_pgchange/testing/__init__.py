"""Test DAGs and their functions without a server, with a batch of changes that the test gives.

``run_batch_once`` and ``run_step_once`` need Airflow, ``run_spark_once`` needs the extra ``spark``.
"""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.testing.changes import batch_of, changes_of
    from airflow_pgchange.testing.handlers import HandlerFailure
    from airflow_pgchange.testing.operators import BatchRun, run_batch_once
    from airflow_pgchange.testing.recorded_connection import RecordedConnection, Statement
    from airflow_pgchange.testing.sagas import StepRun, run_step_once
    from airflow_pgchange.testing.spark import Merged, SparkRun, run_spark_once
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "changes": ["batch_of", "changes_of"],
            "handlers": ["HandlerFailure"],
            "operators": ["BatchRun", "run_batch_once"],
            "recorded_connection": ["RecordedConnection", "Statement"],
            "sagas": ["StepRun", "run_step_once"],
            "spark": ["Merged", "SparkRun", "run_spark_once"],
        },
    )

__all__ = [
    "BatchRun",
    "HandlerFailure",
    "Merged",
    "RecordedConnection",
    "SparkRun",
    "Statement",
    "StepRun",
    "batch_of",
    "changes_of",
    "run_batch_once",
    "run_spark_once",
    "run_step_once",
]
