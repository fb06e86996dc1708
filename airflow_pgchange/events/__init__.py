"""Publish events to the event log, subscribe to them and handle them. Needs psycopg only, no Airflow and no Spark.

``event_router`` and ``webhook`` need the extra ``http``.
"""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily
from airflow_pgchange.events.event import Event
from airflow_pgchange.events.handler import Delivery, Handler
from airflow_pgchange.events.handler_run import Handled
from airflow_pgchange.events.handlers import EventHandlers
from airflow_pgchange.events.publisher import Publisher
from airflow_pgchange.events.publishing import publish
from airflow_pgchange.events.subscriptions import Selection, heartbeat, subscribe, topical, unsubscribe

if TYPE_CHECKING:
    from airflow_pgchange.events.http import event_router
    from airflow_pgchange.events.streams import EventStreams
    from airflow_pgchange.events.webhooks import each_event, webhook
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {"http": ["event_router"], "streams": ["EventStreams"], "webhooks": ["each_event", "webhook"]},
    )

__all__ = [
    "Delivery",
    "Event",
    "EventHandlers",
    "EventStreams",
    "Handled",
    "Handler",
    "Publisher",
    "Selection",
    "each_event",
    "event_router",
    "heartbeat",
    "publish",
    "subscribe",
    "topical",
    "unsubscribe",
    "webhook",
]
