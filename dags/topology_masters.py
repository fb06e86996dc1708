"""New masters: waits until each replicaset of a cluster has a master, and logs the changes.

Needs the connection ``catalogue``, or the one that you name. The tool that promotes your standbys records each new
master with ``topology.set_master()``: for Patroni, ``patroni/set_master.sh`` does it. The last task is the place for what
should happen after a failover.
"""

import logging
from collections.abc import Iterator
from datetime import timedelta

from airflow.sdk import DAG, task
from psycopg import Connection

from airflow_pgchange import Change, FeedSensor, TopologyFeed, feed_asset
from airflow_pgchange.feeds import TopologyCondition

CATALOGUE = TopologyFeed("masters")
MASTERS = "select name, current_master_name from topology._pico_replicaset where uuid = any(%s) order by name"

log = logging.getLogger(__name__)


def topology_masters(dag_id: str = "topology_masters", *, postgres_conn_id: str = "catalogue") -> DAG:
    with DAG(
        dag_id,
        schedule=[feed_asset(CATALOGUE, postgres_conn_id)],
        max_active_runs=1,
        default_args={"retries": 5, "retry_delay": timedelta(seconds=10)},
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
    ) as made:
        wait_for_masters = FeedSensor(
            task_id="wait_for_masters",
            feed=TopologyCondition("every replicaset has a master"),
            postgres_conn_id=postgres_conn_id,
            deferrable=True,
            timeout=3600,
        )

        @task.pgchange_batch(feed=CATALOGUE, postgres_conn_id=postgres_conn_id, max_batches=None)
        def log_masters(changes: Iterator[Change], connection: Connection) -> None:
            changed = [
                change.data["replicaset_uuid"] for change in changes if change.data.get("current_master_uuid")
            ]
            for replicaset, master in connection.execute(MASTERS, [changed]):
                log.info("%s is the master of replicaset %s", master, replicaset)

        wait_for_masters >> log_masters()
    return made


topology_masters_dag = topology_masters()
