"""The schedule of DAGs that handle sagas."""

from __future__ import annotations

from collections.abc import Mapping

from airflow.sdk import AssetAny

from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import QueueFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.messages import Saga


def saga_schedule(
    saga: Saga,
    postgres_conn_id: str = PgChangeHook.default_conn_name,
    *,
    consumers: Mapping[str, str] | None = None,
) -> AssetAny:
    """Return the schedule of a DAG that processes all queues of a saga.

    The DAG runs when a message in one of these queues is due and no handler is at work on it. That includes messages that
    are retried later, and messages whose handler died. So the sagas go on until they end.

    ``consumers`` has the name of the handlers' consumer for each queue; default: ``default``. Raises InvalidArgument for
    a queue from which the saga's handlers receive nothing.
    """
    by_queue = dict(consumers or {})
    if unknown := set(by_queue) - set(saga.worked):
        raise InvalidArgument(
            f"saga {saga.name}: no handler of it receives from {', '.join(sorted(unknown))}: "
            f"name consumers of {', '.join(saga.worked)}"
        )
    feeds = [QueueFeed(queue, by_queue.get(queue, "default")) for queue in saga.worked]
    return AssetAny(*(feed_asset(feed, postgres_conn_id) for feed in feeds))
