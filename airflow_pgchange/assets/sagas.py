"""When the handlers of sagas have something to do."""

from __future__ import annotations

from airflow.sdk import AssetAny

from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.feeds import QueueFeed
from airflow_pgchange.sagas import Saga


def saga_schedule(saga: Saga, postgres_conn_id: str) -> AssetAny:
    """The schedule of a DAG that works off all queues of a saga: it runs whenever a message of one of them is due that
    nobody is at, also one that is tried again later, or whose handler died. So its sagas go on until they end.
    """
    return AssetAny(*(feed_asset(QueueFeed(queue), postgres_conn_id) for queue in saga.worked))
