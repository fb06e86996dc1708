"""Sensors that wait for changes, or for a consumer to have processed them."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.sensors.consumer import ConsumerSensor
    from airflow_pgchange.sensors.feed import FeedSensor
    from airflow_pgchange.sensors.sagas import SagaSensor
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "consumer": ["ConsumerSensor"],
            "feed": ["FeedSensor"],
            "sagas": ["SagaSensor"],
        },
    )

__all__ = [
    "ConsumerSensor",
    "FeedSensor",
    "SagaSensor",
]
