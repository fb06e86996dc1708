"""The version of a batch is its claim's: no ack moves a consumer to one that nobody claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
)
from airflow_pgchange.feeds.errors import StaleClaim
from tests.topology import make_catalogue

LARGEST = 2**63 - 1

COMMIT = (
    "create table public.movement (id bigint generated always as identity primary key); "
    "select revision.track('public.movement', branch_id => '0')",
    "insert into public.movement default values",
)
TUBE = (
    "select tube.tube_ensure_exists('q')",
    "insert into q (op, shard, ids) values ('T', 0, array[1])",
)
EVENTS = (
    "insert into pgmb.subscriptions (group_id) values ('g')",
    "insert into pgmb.events (topic, payload) values ('t', '{}')",
)
TOPOLOGY = ("", "select topology.add_replicaset('r' || (random() * 1e9)::int)")
QUEUE = ("select mbus.create_queue('q', 2)", "select mbus.post_q('n=>1')")

FEEDS = [
    (CommitFeed("c", 0), *COMMIT),
    (TubeFeed("q"), *TUBE),
    (EventFeed("g"), *EVENTS),
    (TopologyFeed("t"), *TOPOLOGY),
    pytest.param(QueueFeed("q"), *QUEUE, marks=pytest.mark.hstore),
]


def acked(feed, db, source=None, version=lambda claimed: claimed):
    """Claim a batch and ack it as another version; which was claimed."""
    with ConsumerTransaction(feed, db, source) as consumer:
        batch = consumer.claim(1)
        consumer.batch = replace(batch, version=version(batch.version))
        consumer.ack()
    return batch.version


WRONG = {
    "the largest": lambda claimed: LARGEST,
    "far ahead": lambda claimed: claimed + 2**40,
    "the next": lambda claimed: claimed + 1,
    "the one before": lambda claimed: claimed - 1,
    "nothing": lambda claimed: None,
}


@pytest.mark.parametrize(("feed", "made", "written"), FEEDS, ids=lambda one: getattr(one, "kind", ""))
def test_an_ack_of_another_version_than_the_claimed_one_is_refused_and_moves_nothing(
    connect, db, feed, made, written
):
    connection = connect()
    if isinstance(feed, TopologyFeed):
        make_catalogue(connection)
    connection.execute(made)
    connection.execute(written)
    for name, version in WRONG.items():
        with pytest.raises(StaleClaim):
            acked(feed, db, version=version)
            pytest.fail(name)
    first = acked(feed, db)
    connection.execute(written)
    assert acked(feed, db) > first


@pytest.mark.parametrize(
    ("feed", "made", "written"),
    [one for one in FEEDS[:4] if one[0].progress == "results"],
    ids=lambda one: getattr(one, "kind", ""),
)
def test_where_the_results_are_elsewhere_no_ack_goes_beyond_what_could_have_been_claimed(
    connect, connect_to, db, other_db, feed, made, written
):
    connection = connect()
    if isinstance(feed, TopologyFeed):
        make_catalogue(connection)
    connection.execute(made)
    connection.execute(written)
    if isinstance(feed, EventFeed):
        connect_to(other_db).execute(made)
    for name in ("the largest", "far ahead", "the one before", "nothing"):
        with pytest.raises(StaleClaim):
            acked(feed, other_db, db, WRONG[name])
            pytest.fail(name)
    assert acked(feed, other_db, db) > 0
