"""Delays of every route, kept up to date: each departure, arrival and cancellation is a commit.

Needs the connections ``airline`` and ``spark_default``, and the tables that ``make demo`` creates.
"""

from pathlib import Path

from airflow.sdk import dag

from airflow_pgchange import CommitFeed, SparkBatchOperator, feed_asset

MOVEMENTS = CommitFeed(consumer_id="route_delay", branch_id=0)


@dag(
    schedule=[feed_asset(MOVEMENTS, postgres_conn_id="airline")],
    max_active_runs=1,
    tags=["pgchange"],
    doc_md=__doc__,
)
def flight_delays() -> None:
    SparkBatchOperator(
        task_id="aggregate",
        feed=MOVEMENTS,
        postgres_conn_id="airline",
        application=str(Path(__file__).parent / "spark" / "route_delays.py"),
        max_batches=None,
        idle_timeout="5 s",
    )


flight_delays_dag = flight_delays()
