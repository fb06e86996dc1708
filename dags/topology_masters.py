"""Waits until each replicaset of a cluster has a master, and logs new masters.

Needs the connection ``catalogue``, or another connection that you name. The tool that promotes your standbys must
record each new master with ``topology.set_master()``. For Patroni, ``patroni/set_master.sh`` does so. Add your own
actions after a failover to the last task.
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
