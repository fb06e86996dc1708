"""Streams of events as an application serves them, for the tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastapi import FastAPI, HTTPException

from airflow_pgchange.events import publish, topical
from airflow_pgchange.events.http import event_router
from airflow_pgchange.events.streams import EventStreams
from tests.handling import numbered
from tests.web import listening, served


def may_read(name: str):
    """Allow all roles to read every topic except the topic ``secret``."""
    if name == "secret":
        raise HTTPException(403, "topic secret is private")
    return topical(name)


@contextmanager
def serving(db: str) -> Iterator[Any]:
    """Yield a function that starts a web server for streams of ``db``. It returns the streams and their address."""
    with ExitStack() as stack:

        def start(may_read=may_read, group="web", conninfo=db, **options):
            named = ("keep_alive", "reconnect", "send_timeout")
            given = {name: options.pop(name) for name in named if name in options}
            streams = EventStreams(conninfo, group, poll_interval=0.01, **options)
            app = FastAPI()
            app.include_router(event_router(streams, may_read, **given), prefix="/events")
            address = stack.enter_context(served(app, streams.stop))
            return streams, f"{address}/events"

        yield start


def numbers(messages):
    return [json.loads(message.data)["payload"]["n"] for message in messages]


def check_reconnecting(address, connection):
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 2))
        [seen] = client.events(1)
    publish(connection, numbered(2, 3))
    with listening(f"{address}/t", seen.id) as client:
        assert numbers(client.events(2)) == [1, 2]
