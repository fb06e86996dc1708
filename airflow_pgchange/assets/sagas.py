"""When the handlers of sagas have something to do."""

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
    """The schedule of a DAG that works off all queues of a saga: it runs whenever a message of one of them is due that
    nobody is at, also one that is tried again later, or whose handler died. So its sagas go on until they end.

    ``consumers`` names those by whom its handlers receive, by queue; default: ``default``. Raises InvalidArgument for a
    queue from which the saga's handlers receive nothing.
    """
    named = dict(consumers or {})
    if strange := set(named) - set(saga.worked):
        raise InvalidArgument(
            f"saga {saga.name}: no handler of it receives from {', '.join(sorted(strange))}: "
            f"name consumers of {', '.join(saga.worked)}"
        )
    feeds = [QueueFeed(queue, named.get(queue, "default")) for queue in saga.worked]
    return AssetAny(*(feed_asset(feed, postgres_conn_id) for feed in feeds))
