"""Failovers: where the master of a replicaset went Offline in the catalogue, its best standby takes over.

Whatever watches your servers says so: ``select topology.set_state('<instance>', 'Offline')``. Needs the connections
``catalogue``; ``instances`` (user, password and database of any instance); and for the consumers one a replicaset, called
like it, whose host lists all of its instances as ``a:5432,b:5432``, and ``warehouse``, where their results are. What each
needs to be allowed is in docs/roles.md.
"""

import logging
from datetime import timedelta

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import dag, task

from airflow_pgchange import CommitFeed, PgChangeHook, TopologyFeed, feed_asset
from airflow_pgchange.admin import repair_consumer
from airflow_pgchange.errors import SourceLostTail
from airflow_pgchange.feeds import lag
from airflow_pgchange.topology import failover

CATALOGUE = TopologyFeed("failover")
CONSUMERS = {
    "r1": [CommitFeed(consumer_id="accounts of r1", branch_id=0)],
    "r2": [CommitFeed(consumer_id="accounts of r2", branch_id=0)],
}

log = logging.getLogger(__name__)


@dag(
    schedule=[feed_asset(CATALOGUE, postgres_conn_id="catalogue")],
    max_active_runs=1,
    default_args={"retries": 5, "retry_delay": timedelta(seconds=10)},
    tags=["pgchange"],
    doc_md=__doc__,
)
def topology_failover() -> None:
    @task.pgchange_batch(feed=CATALOGUE, postgres_conn_id="catalogue", max_batches=None)
    def fail_over() -> None:
        """What changed does not matter: the catalogue is looked at as it is now."""
        failover.fail_over_all(PgChangeHook("catalogue").conninfo(), PgChangeHook("instances").conninfo())

    @task(trigger_rule="all_done")
    def move_consumers(replicaset: str) -> None:
        """Their connections find the new master. Who has seen what it never got goes on from the last that it has.
        Each replicaset for itself: also where another could not be failed over."""
        with (
            PgChangeHook("warehouse").get_conn(primary=True) as results,
            PgChangeHook(replicaset).get_conn(primary=True) as source,
        ):
            for feed in CONSUMERS[replicaset]:
                try:
                    lag(results, source, feed)
                except SourceLostTail:
                    log.warning("%s goes on, %s", feed.name, repair_consumer(results, source, feed))

    # A run is as its last tasks are, and consumers are moved also where a failover failed.
    fail_over() >> [move_consumers.expand(replicaset=list(CONSUMERS)), EmptyOperator(task_id="failed_over")]


topology_failover_dag = topology_failover()
