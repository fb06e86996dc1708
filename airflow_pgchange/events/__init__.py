"""Publishing to the event log, subscribing to it, and handling what comes: psycopg only, no Airflow and no Spark."""

from airflow_pgchange.events.event import Event
from airflow_pgchange.events.handler import Delivery, Handler
from airflow_pgchange.events.handler_run import Handled
from airflow_pgchange.events.handlers import EventHandlers
from airflow_pgchange.events.publish import publish
from airflow_pgchange.events.publisher import Publisher
from airflow_pgchange.events.subscriptions import Selection, heartbeat, subscribe, topical, unsubscribe

__all__ = [
    "Delivery",
    "Event",
    "EventHandlers",
    "Handled",
    "Handler",
    "Publisher",
    "Selection",
    "heartbeat",
    "publish",
    "subscribe",
    "topical",
    "unsubscribe",
]
