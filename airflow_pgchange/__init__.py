"""Change-driven pipelines on PostgreSQL for Apache Airflow.

This package exports the names that most DAGs need. Its packages and the module ``errors`` export the other public names.
"""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.assets import feed_asset, target_tables
    from airflow_pgchange.errors import PgChangeError
    from airflow_pgchange.feeds import (
        Batch,
        Change,
        CommitFeed,
        ConsumerTransaction,
        EventFeed,
        QueueFeed,
        TopologyFeed,
        TubeFeed,
    )
    from airflow_pgchange.hooks import PgChangeHook
    from airflow_pgchange.operators import (
        BatchOperator,
        EventHandlersOperator,
        InstallSchemaOperator,
        MaintenanceOperator,
        SparkBatchOperator,
    )
    from airflow_pgchange.sensors import ConsumerSensor, FeedSensor
    from airflow_pgchange.spark import batch_job, batch_jobs
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "assets": ["feed_asset", "target_tables"],
            "errors": ["PgChangeError"],
            "feeds": [
                "Batch",
                "Change",
                "CommitFeed",
                "ConsumerTransaction",
                "EventFeed",
                "QueueFeed",
                "TopologyFeed",
                "TubeFeed",
            ],
            "hooks": ["PgChangeHook"],
            "operators": [
                "BatchOperator",
                "EventHandlersOperator",
                "InstallSchemaOperator",
                "MaintenanceOperator",
                "SparkBatchOperator",
            ],
            "sensors": ["ConsumerSensor", "FeedSensor"],
            "spark": ["batch_job", "batch_jobs"],
        },
    )

__all__ = [
    "Batch",
    "BatchOperator",
    "Change",
    "CommitFeed",
    "ConsumerSensor",
    "ConsumerTransaction",
    "EventFeed",
    "EventHandlersOperator",
    "FeedSensor",
    "InstallSchemaOperator",
    "MaintenanceOperator",
    "PgChangeError",
    "PgChangeHook",
    "QueueFeed",
    "SparkBatchOperator",
    "TopologyFeed",
    "TubeFeed",
    "batch_job",
    "batch_jobs",
    "feed_asset",
    "target_tables",
]

__version__ = "0.9.0"
