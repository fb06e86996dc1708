"""Short functions to run the handlers of a group and to inspect their calls, for the tests."""

from __future__ import annotations

import threading

from airflow_pgchange.events import Event, EventHandlers, publish, subscribe, topical

SECONDS = 30
"""The time for which a test waits for an expected event."""


class Seen:
    """A handler that records its calls."""

    def __init__(self, before=lambda delivery: None):
        self.deliveries = []
        self._before = before

    def __call__(self, delivery):
        self._before(delivery)
        self.deliveries.append(delivery)

    @property
    def numbers(self):
        return [event.payload["n"] for delivery in self.deliveries for event in delivery.events]

    @property
    def attempts(self):
        return [delivery.attempt for delivery in self.deliveries]


def subscribed(connection):
    """Subscribe group g to topics t and u, and return the connection."""
    subscribe(connection, "g", topical(["t", "u"]))
    return connection


def numbered(start, stop, topic="t", **payload):
    return [Event(topic, {"n": n, **payload}) for n in range(start, stop)]


def group(db, *handlers, **options):
    return EventHandlers("g", handlers, db, **{"poll_interval": 0.01, **options})


LATER = 3600.0
"""A pause before a retry that is longer than any test. ``hurry`` ends the pause."""


def hurry(connection):
    """Make all retries due, and return their number."""
    connection.execute("delete from pgmb.scheduled")
    rows = connection.execute(
        "delete from pgmb.events where id > pgmb.create_event_id(now() + interval '30 minutes', 0) "
        "returning topic, payload, metadata, subscription_id"
    ).fetchall()
    publish(connection, [Event(*row[:3], subscription_id=row[3]) for row in rows])
    return len(rows)


def run_with_retries(handlers, connection):
    """Run the handlers until no event and no retry is left."""
    handlers.run("empty")
    while hurry(connection):
        handlers.run("empty")


def unread(connection, gid="g"):
    connection.execute("select pgmb.poll_for_events()")
    rows = connection.execute(
        "select payload ->> 'n' from pgmb.read_next_events(%s, peek => true) where topic <> 'pgmb-retry'",
        [gid],
    )
    return [int(n) for (n,) in rows.fetchall()]


def held(connection):
    """Whether a session holds the lock of the group."""
    return connection.execute("select pgmb.locked('g')").fetchone()[0]


def failing(times, error=ValueError):
    """Return a handler that raises ``error`` in its first ``times`` calls."""
    left = [times]

    def fail(delivery):
        if left[0] > 0:
            left[0] -= 1
            raise error("poison")

    return fail


def in_thread(function, *arguments):
    """Run a function in a thread. Return a function that waits for the thread and returns the result or the error."""
    came = []

    def work():
        try:
            came.append(function(*arguments))
        except Exception as error:  # noqa: BLE001
            came.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def joined():
        thread.join(SECONDS)
        assert not thread.is_alive()
        return came[0]

    return joined
