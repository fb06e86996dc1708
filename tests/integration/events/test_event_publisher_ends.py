"""Events that a publisher could not publish: it reports them on request, and its memory is bounded."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import InvalidArgument, NotPublished, PublisherFull
from airflow_pgchange.events import Event, Publisher
from tests.handling import in_thread, numbered


@pytest.fixture
def away(db):
    """A port at which nothing listens."""
    return make_conninfo(db, port=1)


def untold(error):
    return [event.payload["n"] for event in error.events]


def test_a_flush_that_waits_while_close_gives_up_says_what_was_not_published(away):
    publisher = Publisher(away)
    publisher.put(numbered(0, 3))
    joined = in_thread(publisher.flush)
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: publisher._hurried == 3, 30)
    with pytest.raises(NotPublished) as raised:
        publisher.close(timeout=0.05)
    flushed = joined()
    assert isinstance(flushed, NotPublished)
    assert untold(flushed) == untold(raised.value) == [0, 1, 2]


def test_a_flush_after_a_close_that_gave_up_says_what_was_not_published(away):
    publisher = Publisher(away, limit=2)
    publisher.put(numbered(0, 3))
    with pytest.raises(NotPublished):
        publisher.close(timeout=0.05)
    with pytest.raises(NotPublished, match="0 refused, 3 unsent") as raised:
        publisher.flush(timeout=30)
    assert untold(raised.value) == [0, 1, 2]


def test_a_close_within_the_block_of_a_publisher_says_once_and_soon_what_was_not_published(away, monkeypatch):
    monkeypatch.setattr(Publisher.close, "__defaults__", (30.0,))
    began = time.monotonic()
    with pytest.raises(NotPublished) as raised, Publisher(away, limit=2) as publisher:
        publisher.put(numbered(0, 5))
        publisher.close(timeout=0.05)
    assert time.monotonic() - began < 30
    assert untold(raised.value) == [0, 1, 2, 3, 4]


def test_a_close_that_gives_up_ends_another_that_waits(away):
    publisher = Publisher(away)
    publisher.put(numbered(0, 3))
    joined = in_thread(publisher.close, 60)
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: publisher._closing, 30)
    with pytest.raises(NotPublished):
        publisher.close(timeout=0.05)
    assert untold(joined()) == [0, 1, 2]


def test_the_memory_of_events_that_were_refused_is_bounded_and_freed_by_a_flush(db):
    publisher = Publisher(db, memory=10_000)
    with pytest.raises(PublisherFull, match="call flush"):
        for number in range(100):
            publisher.put(Event("t", {"n": number, "word": "\0"}))
            with publisher._changed:
                assert publisher._changed.wait_for(lambda: publisher._settled == publisher._accepted, 30)
    with pytest.raises(NotPublished) as raised:
        publisher.flush()
    assert untold(raised.value) == list(range(number))
    assert number <= 10
    publisher.put(numbered(0, 1))
    publisher.close()


@pytest.mark.parametrize("ask", [Publisher.flush, Publisher.close])
def test_a_publisher_whose_thread_has_died_says_so_and_what_it_did_not_publish(db, monkeypatch, ask):
    def broken(publisher):
        raise LookupError("nobody thought of this")

    publisher = Publisher(db, max_age=60)
    publisher.put(numbered(0, 3))
    monkeypatch.setattr(Publisher, "_due", broken)
    asked = in_thread(ask, publisher, 30)()
    assert isinstance(asked, NotPublished)
    assert isinstance(asked.__cause__, LookupError)
    assert "nobody thought" in str(asked)
    assert untold(asked) == [0, 1, 2]
    with pytest.raises(InvalidArgument, match="open another"):
        publisher.put(numbered(3, 4))
    with suppress(NotPublished):
        publisher.close()


def test_a_publisher_whose_thread_has_died_lets_nobody_wait_for_room(db, monkeypatch):
    def broken(publisher):
        raise LookupError("nobody thought of this")

    publisher = Publisher(db, max_age=60, memory=1)
    publisher.put(numbered(0, 1))
    joined = in_thread(publisher.put, numbered(1, 2))
    monkeypatch.setattr(Publisher, "_due", broken)
    with pytest.raises(NotPublished):
        publisher.close(timeout=30)
    assert isinstance(joined(), InvalidArgument)
