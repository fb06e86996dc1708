"""Payloads: each reader gets them as they were published, whatever another reader does with them, and however deep they
are."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

import pytest

from airflow_pgchange.events import Handler, publish
from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from tests.handling import LATER, Seen, failing, group, hurry, numbered, subscribed, unread
from tests.tubes import one


@pytest.fixture
def connection(connect):
    return subscribed(connect())


def test_a_handler_that_changes_a_payload_does_not_affect_other_handlers(db, connection):
    publish(connection, numbered(0, 1, inner={"a": 1}))
    seen = []

    def changes(delivery):
        for event in delivery.events:
            del event.payload["n"]
            event.payload["inner"]["a"] = "changed"

    handlers = group(
        db, Handler("changes", changes), Handler("looks", lambda delivery: seen.extend(delivery.events))
    )
    for _ in range(2):
        handlers.run("empty")
    assert [event.payload for event in seen] == [{"n": 0, "inner": {"a": 1}}]


def test_a_retry_brings_a_payload_as_it_was_published(db, connection):
    publish(connection, numbered(0, 1))
    seen = []

    def run(delivery):
        seen.append(dict(delivery.events[0].payload))
        delivery.events[0].payload["n"] += 100
        if delivery.attempt == 1:
            raise ValueError("no")

    handlers = group(db, Handler("h", run, retries=(LATER,)))
    handlers.run("empty")
    hurry(connection)
    handlers.run("empty")
    assert seen == [{"n": 0}, {"n": 0}]


def test_a_handler_that_puts_into_a_payload_what_is_no_json_stops_nobody(db, connection):
    publish(connection, numbered(0, 3))
    seen = Seen()

    def run(delivery):
        for event in delivery.events:
            event.payload["at"] = datetime.now(UTC)
        raise ValueError("no")

    group(db, Handler("h", run, retries=(LATER,)), Handler("seen", seen)).run("empty")
    assert (seen.numbers, unread(connection)) == ([0, 1, 2], [])
    assert hurry(connection) == 1


@pytest.fixture(params=[900, 3000, 6000])
def deep(request, connection):
    """Publish an event whose payload has this depth, followed by others. Return its JSON, for a Python with the default
    limit."""
    limit = sys.getrecursionlimit()
    # Airflow raises the limit permanently when it copies a task.
    sys.setrecursionlimit(1000)
    text = "[" * request.param + "]" * request.param
    connection.execute("insert into pgmb.events (topic, payload) values ('t', %s::jsonb)", [text])
    publish(connection, numbered(0, 3))
    yield text
    sys.setrecursionlimit(limit)


def test_a_deep_payload_stops_no_handlers_and_comes_as_a_text_where_python_cannot_read_it(db, deep):
    seen = []
    group(db, Handler("h", lambda delivery: seen.extend(event.payload for event in delivery.events))).run(
        "empty"
    )
    assert len(seen) == 4
    assert (json.dumps(seen[0]) if is_read(deep) else seen[0]) == deep


def is_read(text):
    """Python 3.13 parses about 9,000 levels, whatever its recursion limit is."""
    try:
        json.loads(text)
    except RecursionError:
        return False
    return True


def test_a_deep_payload_can_be_given_up(db, connection, deep):
    group(db, Handler("h", failing(9), retries=())).run("empty")
    assert one(connection, "select count(*) from pgchange.letters()") == 1


def test_a_deep_payload_stops_no_feed(db, deep):
    with ConsumerTransaction(EventFeed("g"), db) as consumer:
        assert consumer.claim(10) is not None
        assert len(list(consumer.changes())) == 4
        consumer.ack()


def test_a_handler_that_returns_what_nobody_runs_has_failed(db, connection):
    publish(connection, numbered(0, 1))
    handled = group(db, Handler("h", lambda delivery: (event for event in delivery.events), retries=())).run(
        "empty"
    )
    assert (handled.given_up, unread(connection)) == (1, [])
    assert "returned a generator that nobody runs" in one(connection, "select error from pgchange.letters()")
