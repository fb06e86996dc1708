"""A batch in plain Python: which movement was seen in which batch, exactly once.

Needs the connection ``airline``, and a table: ``create table movement_audit (movement_id bigint primary key, batch_id
uuid, committed_at timestamptz)``.
"""

from collections.abc import Iterator
from datetime import timedelta

from airflow.sdk import dag, task
from psycopg import Connection

from airflow_pgchange import Batch, Change, CommitFeed, feed_asset

MOVEMENTS = CommitFeed(consumer_id="movement_audit", branch_id=0)


@dag(
    schedule=[feed_asset(MOVEMENTS, "airline", min_changes=1000, max_age=timedelta(seconds=30))],
    max_active_runs=1,
    tags=["pgchange"],
    doc_md=__doc__,
)
def movement_audit() -> None:
    @task.pgchange_batch(feed=MOVEMENTS, postgres_conn_id="airline", limit=10_000, max_batches=None)
    def keep(batch: Batch, changes: Iterator[Change], connection: Connection) -> None:
        rows = [(change.id, batch.id, change.created_at) for change in changes]
        with connection.cursor() as cursor:
            cursor.executemany("insert into movement_audit values (%s, %s, %s)", rows)

    keep()


movement_audit_dag = movement_audit()
