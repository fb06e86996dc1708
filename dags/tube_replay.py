"""Keeps copies of tables: rows that touch a tube of the database ``airline`` are read anew and mirrored.

One mapped task runs for each worker that has something to do. Tubes that are made later are found without an edit. A tube
named ``copies`` mirrors ``public.flight`` into ``copies.flight``, which must exist. Tables with the same name in several
schemas share a copy, whose key is (shard, id). A copy must belong to the role of the connection or to a superuser, and
the owner of the tube's pods must be allowed to write it; any other table with such a name is not written.

Needs our schemas in that database (``airflow pgchange install --postgres-conn-id airline``), and the connections
``airline`` and ``spark_default``.
"""

from pathlib import Path
from typing import Any

from airflow.sdk import dag, task, task_group

from airflow_pgchange import PgChangeHook, SparkBatchOperator, feed_asset, tubes
from airflow_pgchange.feeds import AllTubes, to_json
from airflow_pgchange.operators import TubeGarbageCollectOperator

AIRLINE = "airline"


@dag(
    schedule=[feed_asset(AllTubes(), postgres_conn_id=AIRLINE)],
    max_active_runs=1,
    tags=["pgchange"],
    doc_md=__doc__,
)
def tube_replay() -> None:
    @task
    def workers() -> list[dict[str, Any]]:
        with PgChangeHook(AIRLINE).get_conn(primary=True) as connection:
            return [to_json(feed) for feed in tubes.ready(connection)]

    @task_group
    def worker(feed: Any) -> None:
        replay = SparkBatchOperator(
            task_id="replay",
            feed=feed,
            postgres_conn_id=AIRLINE,
            application=str(Path(__file__).parent / "spark" / "mirror.py"),
            max_batches=None,
            map_index_template="{{ task.feed.tube }}/{{ task.feed.worker }}",
        )
        collect = TubeGarbageCollectOperator(
            task_id="collect",
            feed=feed,
            downstream="{tube}.{table}",
            postgres_conn_id=AIRLINE,
            map_index_template="{{ task.feed.tube }}/{{ task.feed.worker }}",
        )
        replay >> collect

    worker.expand(feed=workers())


tube_replay_dag = tube_replay()
