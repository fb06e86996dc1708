"""Appends each departure, arrival and cancellation to an Iceberg table, exactly once.

Needs the connections ``airline`` and ``spark_default``, or others that you name, the tables that ``make demo`` creates,
and the Iceberg table ``flights.movement`` of the catalog ``lake``. The guide to lake tables explains how to create a
catalog.
"""

from pathlib import Path

from airflow.sdk import DAG

from airflow_pgchange import CommitFeed, SparkBatchOperator, feed_asset

MOVEMENTS = CommitFeed(consumer="lake", branch=0)


def movements_in_lake(
    dag_id: str = "movements_in_lake",
    *,
    postgres_conn_id: str = "airline",
    spark_conn_id: str = "spark_default",
) -> DAG:
    with DAG(
        dag_id,
        schedule=[feed_asset(MOVEMENTS, postgres_conn_id)],
        max_active_runs=1,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
    ) as made:
        SparkBatchOperator(
            task_id="append",
            feed=MOVEMENTS,
            postgres_conn_id=postgres_conn_id,
            conn_id=spark_conn_id,
            application=str(Path(__file__).parent / "spark" / "append_to_lake.py"),
            max_batches=None,
            idle_timeout="5 s",
        )
    return made


movements_in_lake_dag = movements_in_lake()
