"""Keeps copies of tables: rows that were touched in a tube are read again and mirrored.

A mapped task runs for each worker with ready changes. Tubes that are created later are included. A tube named
``copies`` mirrors ``public.flight`` into ``copies.flight``, which must exist. Tables with the same name in several
schemas share a copy, whose key is (shard, id). A copy must belong to the role of the connection or to a superuser. The
owner of the tube's pods must be allowed to write it. Any other table with such a name is not written.

Needs the connections ``airline`` and ``spark_default``, or others that you name, and our schemas in that database
(``airflow-pgchange install --postgres-conn-id airline``).
"""

from pathlib import Path
from typing import Any

from airflow.sdk import DAG, task, task_group

from airflow_pgchange import PgChangeHook, SparkBatchOperator, feed_asset, tubes
from airflow_pgchange.feeds import AllTubes, to_json
from airflow_pgchange.operators import TubeGarbageCollectOperator


def tube_replay(
    dag_id: str = "tube_replay", *, postgres_conn_id: str = "airline", spark_conn_id: str = "spark_default"
) -> DAG:
    with DAG(
        dag_id,
        schedule=[feed_asset(AllTubes(), postgres_conn_id)],
        max_active_runs=1,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
    ) as made:

        @task
        def workers() -> list[dict[str, Any]]:
            with PgChangeHook(postgres_conn_id).get_conn(primary=True) as connection:
                return [to_json(feed) for feed in tubes.ready(connection)]

        @task_group
        def worker(feed: Any) -> None:
            replay = SparkBatchOperator(
                task_id="replay",
                feed=feed,
                postgres_conn_id=postgres_conn_id,
                conn_id=spark_conn_id,
                application=str(Path(__file__).parent / "spark" / "mirror.py"),
                max_batches=None,
                map_index_template="{{ task.feed.tube }}/{{ task.feed.worker }}",
            )
            collect = TubeGarbageCollectOperator(
                task_id="collect",
                feed=feed,
                downstream="{tube}.{table}",
                postgres_conn_id=postgres_conn_id,
                map_index_template="{{ task.feed.tube }}/{{ task.feed.worker }}",
            )
            replay >> collect

        worker.expand(feed=workers())
    return made


tube_replay_dag = tube_replay()
