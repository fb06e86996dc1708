"""The decorators of ``@task``: ``@task.pgchange_batch`` is ``pgchange_batch_task`` here, and so on."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.decorators.batch import pgchange_batch_task
    from airflow_pgchange.decorators.handlers import pgchange_handler_task
    from airflow_pgchange.decorators.sagas import pgchange_saga_task
    from airflow_pgchange.decorators.spark import pgchange_spark_task
    from airflow_pgchange.decorators.tube import pgchange_collect_task
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "batch": ["pgchange_batch_task"],
            "handlers": ["pgchange_handler_task"],
            "sagas": ["pgchange_saga_task"],
            "spark": ["pgchange_spark_task"],
            "tube": ["pgchange_collect_task"],
        },
    )

__all__ = [
    "pgchange_batch_task",
    "pgchange_collect_task",
    "pgchange_handler_task",
    "pgchange_saga_task",
    "pgchange_spark_task",
]
