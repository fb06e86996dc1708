"""Keeps the delays of every route up to date. Each departure, arrival and cancellation is a commit.

Needs the connections ``airline`` and ``spark_default``, or others that you name, and the tables that ``make demo``
creates.
"""

from pathlib import Path

from airflow.sdk import DAG

from airflow_pgchange import CommitFeed, SparkBatchOperator, feed_asset

MOVEMENTS = CommitFeed(consumer="route_delay", branch=0)


def flight_delays(
    dag_id: str = "flight_delays", *, postgres_conn_id: str = "airline", spark_conn_id: str = "spark_default"
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
            task_id="aggregate",
            feed=MOVEMENTS,
            postgres_conn_id=postgres_conn_id,
            conn_id=spark_conn_id,
            application=str(Path(__file__).parent / "spark" / "route_delays.py"),
            max_batches=None,
            idle_timeout="5 s",
        )
    return made


flight_delays_dag = flight_delays()
