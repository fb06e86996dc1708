"""Runs two handlers of the event log when events are ready. The first keeps the history of flights, the second
announces changes.

Before the first run:

1. ``create table flight_history (event_id text primary key, topic text not null, flight jsonb not null)``
2. ``select pgmb.push_table_mutations('public.flight')``: from now on each change of that table is an event
3. unpause the DAG and trigger it once: its first task subscribes the group

Needs the connection ``airline``, or another connection that you name, to a database with our schemas and a table
``public.flight`` with an ``id``.
"""

import logging
from functools import partial
from typing import Any

from airflow.sdk import DAG
from psycopg.types.json import Jsonb

from airflow_pgchange import EventFeed, EventHandlersOperator, PgChangeHook, feed_asset
from airflow_pgchange.events import Delivery, Event, Handler
from airflow_pgchange.operators import SubscribeEventsOperator

GROUP = "flights"
TOPICS = ["public.flight.insert", "public.flight.update", "public.flight.delete"]

log = logging.getLogger(__name__)


def flight(event: Event) -> dict[str, Any]:
    """Return the row after the change, or before its deletion. The payload of an update has only the changed columns."""
    return {**event.metadata.get("old", {}), **event.payload}


def keep_history(delivery: Delivery, postgres_conn_id: str) -> None:
    """Keep each event once, although it may be delivered again. Failed events are retried, and finally become dead
    letters."""
    rows = [(event.id, event.topic, Jsonb(flight(event))) for event in delivery.events]
    with PgChangeHook(postgres_conn_id).get_conn(primary=True) as connection, connection.transaction():
        connection.cursor().executemany(
            "insert into flight_history values (%s, %s, %s) on conflict do nothing", rows
        )


def announce(delivery: Delivery) -> None:
    """Log each event. Events of the same flight come in order, others in parallel. The handler is not reliable: a
    failure is only logged."""
    for event in delivery.events:
        log.info("flight %s: %s", flight(event)["id"], event.topic)


def event_handlers(dag_id: str = "event_handlers", *, postgres_conn_id: str = "airline") -> DAG:
    with DAG(
        dag_id,
        schedule=[feed_asset(EventFeed(GROUP), postgres_conn_id)],
        max_active_runs=1,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
    ) as made:
        subscribe = SubscribeEventsOperator(
            task_id="subscribe", group=GROUP, topics=TOPICS, postgres_conn_id=postgres_conn_id
        )
        handle = EventHandlersOperator(
            task_id="handle",
            group=GROUP,
            handlers=[
                Handler("history", partial(keep_history, postgres_conn_id=postgres_conn_id), retries=(5, 60)),
                Handler("announce", announce, reliable=False, key=lambda event: flight(event)["id"]),
            ],
            postgres_conn_id=postgres_conn_id,
        )
        subscribe >> handle
    return made


event_handlers_dag = event_handlers()
