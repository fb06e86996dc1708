"""What is the same for the consumers of every kind of feed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    Feed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
    consumers,
)
from airflow_pgchange.feeds.errors import TransactionNotClean, UnknownConsumer, translated
from airflow_pgchange.feeds.feed import Movable
from airflow_pgchange.feeds.queries import ask
from tests import commits, queues, topology, tubes
from tests.events import publish, subscribe
from tests.ledger import Connect


def _events(connection: Any) -> None:
    subscribe(connection, "g")
    publish(connection, "t")


def _tube(connection: Any) -> None:
    tubes.make(connection, "q")
    connection.execute("create table public.item (id bigint primary key)")
    tubes.attach(connection)
    connection.execute("insert into public.item values (1)")


def _queue(connection: Any) -> None:
    queues.make(connection)
    queues.post(connection, 1)


FEEDS: dict[str, tuple[Feed, Callable[[Any], Any]]] = {
    "commit": (CommitFeed("c", 0), commits.commits),
    "event": (EventFeed("g"), _events),
    "tube": (TubeFeed("q"), _tube),
    "queue": (QueueFeed("q"), _queue),
    "topology": (TopologyFeed("c"), topology.make_catalogue),
}
each = pytest.mark.parametrize(
    ("feed", "fill"),
    [
        pytest.param(*values, id=name, marks=[pytest.mark.hstore] if name == "queue" else [])
        for name, values in FEEDS.items()
    ],
)


@each
def test_a_claim_in_a_transaction_that_has_written_is_refused(
    feed: Feed, fill: Callable[[Any], Any], connect: Connect
) -> None:
    """What it wrote may be among the changes, which nobody else can read yet, and a claim that ends with the work's
    transaction is no record of it."""
    connection, keeper = connect(), connect(autocommit=False)
    fill(connection)
    ask(connection, feed.register())
    connection.execute("create table public.other (n integer)")
    assert ask(keeper, feed.lock())
    position = ask(keeper, feed.position())
    with pytest.raises(TransactionNotClean, match="already written"), translated(), connection.transaction():
        connection.execute("insert into public.other values (1)")
        ask(connection, feed.claim(position, 10, None, None))
    with translated(), connection.transaction():
        assert ask(connection, feed.claim(position, 10, None, None))["count"] > 0


@each
def test_a_consumer_transaction_that_has_written_claims_nothing(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    connection.execute("create table public.other (n integer)")
    with pytest.raises(TransactionNotClean), ConsumerTransaction(feed, db) as consumer:
        consumer.connection.execute("insert into public.other values (1)")
        consumer.claim(10)


MOVABLE = [feed for feed, _ in FEEDS.values() if isinstance(feed, Movable)]


@pytest.mark.parametrize("feed", MOVABLE, ids=lambda feed: feed.kind)
def test_a_consumer_that_nobody_knows_is_not_dropped_but_named_with_where_the_others_are(
    feed: Movable, connect: Connect
) -> None:
    connection = connect()
    with pytest.raises(UnknownConsumer, match="there is no (consumer|group)") as told:
        consumers.drop(connection, connection, feed)
    assert (feed.name.split("/")[0].split(":")[-1]) in str(told.value)
    assert "lists them" in str(told.value)


def test_the_claim_of_a_consumer_of_the_topology_whose_progress_is_elsewhere_is_dropped(
    connect: Connect, db: str, other_db: str, connect_to: Any
) -> None:
    catalogue, results = connect(), connect_to(other_db)
    topology.make_catalogue(catalogue)
    feed = TopologyFeed("c")
    with ConsumerTransaction(feed, other_db, source=db) as consumer:
        consumer.claim(10)
        consumer.ack()
    consumers.drop(results, catalogue, feed)
    assert catalogue.execute("select from pgchange.claim").fetchall() == []
