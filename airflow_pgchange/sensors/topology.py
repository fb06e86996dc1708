"""A sensor for the condition of a cluster."""

from __future__ import annotations

from typing import Any

from airflow_pgchange.feeds.conditions import TopologyCondition
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.sensors.pgchange import FeedSensor


class TopologySensor(FeedSensor):
    """Waits until a condition of a cluster holds, such as ``every replicaset has a master``.

    It holds at one moment: what comes after the sensor may find it otherwise.

    :param condition: one of ``airflow_pgchange.feeds.conditions.LACKING``
    :param postgres_conn_id: the database of the cluster's catalogue
    :param kwargs: ``deferrable``, ``poke_interval``, ``poll_interval``, ``timeout`` and so on, as FeedSensor has them
    """

    def __init__(
        self, *, condition: str, postgres_conn_id: str = PgChangeHook.default_conn_name, **kwargs: Any
    ) -> None:
        super().__init__(feed=TopologyCondition(condition), postgres_conn_id=postgres_conn_id, **kwargs)
