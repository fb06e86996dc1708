"""The batches of a group: their events and order, and reading in slices."""

from __future__ import annotations

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_pgchange.feeds import Change, ConsumerTransaction, EventFeed
from airflow_pgchange.feeds.feed import partitions
from tests.batches import taken
from tests.events import (
    FEED,
    TOPICAL,
    poll_all,
    publish,
    read,
    subscribe,
    work_all,
)
from tests.tubes import one

pytestmark = pytest.mark.usefixtures("few_sessions")


def test_a_batch_has_events_with_payload_time_and_subscriptions(db, connect):
    connection = connect()
    sid = subscribe(connection)
    publish(connection, "a", payload={"k": 1})
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.claim(10).count == 1
        [change] = consumer.changes()
        consumer.ack()
    assert change.data == {"topic": "a", "payload": {"k": 1}, "metadata": {}, "subscription_ids": [sid]}
    assert change.created_at == one(connection, "select pgmb.extract_date_from_event_id(%s)", change.id)


class Asking(EventFeed):
    """Reads the setting jit in the session that reads a batch."""

    columns = (("jit", "text"),)

    def changes(self, batch, part):
        return sql.SQL("(select current_setting('jit') as jit) as asked")

    def change(self, row):
        return Change(id=row["jit"], position="", created_at=None)


def test_a_batch_of_many_partitions_is_read_without_compiling_a_plan_for_each(db, connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    with ConsumerTransaction(Asking("g"), make_conninfo(db, options="-c jit=on")) as consumer:
        assert consumer.claim(1) is not None
        assert [change.id for change in consumer.changes()] == ["off"]
        consumer.ack()


def test_batches_follow_one_another_in_order_without_any_other_process(db, connect):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, *["t"] * 250)
    assert work_all(db, limit=100) == ids


def test_a_group_with_several_subscriptions_gets_each_event_once_in_order(db, connect):
    connection = connect()
    subscribe(connection)
    subscribe(connection, "g", TOPICAL, {"topic": "a"})
    ids = publish(connection, *["a", "b"] * 120)
    assert work_all(db, limit=33) == ids


def test_positions_are_cursors_that_lead_on(db, connect):
    connection = connect()
    subscribe(connection)
    subscribe(connection, "g", TOPICAL, {"topic": "a"})
    ids = publish(connection, "a", "b", "a")
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        changes = list(consumer.changes())
        consumer.ack()
    assert [row["id"] for row in read(connection, cursor=changes[1].position)] == ids[2:]


def test_batches_that_cut_one_dispatch_have_the_positions_that_lead_through_it(db, connect):
    connection = connect()
    subscribe(connection)
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, 1000)"
    )
    poll_all(connection)
    positions = [change.position for _ in range(3) for change in taken(FEED, db, limit=450)]
    assert [int(position[15:], 16) for position in positions] == list(range(1, 1001))


def test_any_number_of_partitions_together_are_the_batch(db, connect):
    connection = connect()
    subscribe(connection)
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, 25000)"
    )
    with ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(24_000)
        assert batch.count == 24_000
        found = partitions(FEED, batch, 2)
        parts = [[row[0] for row in connection.execute(part.query).fetchall()] for part in found]
        consumer.ack()
    assert [len(part) for part in parts] == [part.count for part in found]
    wanted = connection.execute("select id from pgmb.events order by id limit 24000").fetchall()
    assert (len(parts), [each for part in parts for each in part]) == (2, [row[0] for row in wanted])
