"""Records for each movement the batch that had it, exactly once, in plain Python.

Needs the connection ``airline``, or another connection that you name, and a table: ``create table movement_audit
(movement_id bigint primary key, batch_id uuid, committed_at timestamptz)``.
"""

from collections.abc import Iterator
from datetime import timedelta

from airflow.sdk import DAG, task
from psycopg import Connection

from airflow_pgchange import Batch, Change, CommitFeed, feed_asset

MOVEMENTS = CommitFeed(consumer="movement_audit", branch=0)


def movement_audit(dag_id: str = "movement_audit", *, postgres_conn_id: str = "airline") -> DAG:
    with DAG(
        dag_id,
        schedule=[feed_asset(MOVEMENTS, postgres_conn_id, min_changes=1000, max_age=timedelta(seconds=30))],
        max_active_runs=1,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
    ) as made:

        @task.pgchange_batch(
            feed=MOVEMENTS, postgres_conn_id=postgres_conn_id, limit=10_000, max_batches=None
        )
        def keep(batch: Batch, changes: Iterator[Change], connection: Connection) -> None:
            rows = [(change.id, batch.id, change.created_at) for change in changes]
            with connection.cursor() as cursor:
                cursor.executemany("insert into movement_audit values (%s, %s, %s)", rows)

        keep()
    return made


movement_audit_dag = movement_audit()
