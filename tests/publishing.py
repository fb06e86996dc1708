"""Events to publish, and functions to read the stored events, for the tests of publishers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow_pgchange.events import Event, publisher
from airflow_pgchange.events.event import event_id

HOUR = timedelta(hours=1)
SECONDS = 30
POISON = {"word": "\0"}
"""Valid JSON that PostgreSQL cannot store."""
TAKEN, TWICE = event_id(datetime.now(UTC), 1), event_id(datetime.now(UTC), 2)


def numbers(count, **more):
    return [Event("t", {"n": n}, **more) for n in range(count)]


def stored(connection):
    rows = connection.execute("select payload ->> 'n' from pgmb.events order by id").fetchall()
    return [int(n) for (n,) in rows]


def topics(connection):
    return [topic for (topic,) in connection.execute("select topic from pgmb.events order by id")]


def be_impatient(monkeypatch):
    """Shorten the pauses of publishers."""
    monkeypatch.setattr(publisher, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(publisher, "LONGEST_PAUSE", 0.05)
