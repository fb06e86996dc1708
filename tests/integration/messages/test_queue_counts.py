"""The numbers of messages in queues, for people: a row for each consumer."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import manual_operations
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from tests import queues

pytestmark = pytest.mark.hstore

FEED = QueueFeed("q")


def told(connection, *names, upto=1000):
    """Return these columns of the rows, one consumer after another."""
    query = f"select {', '.join(names)} from mbus.queues(%s)"
    return connection.execute(query, [upto]).fetchall()


def test_each_message_counts_as_ready_delayed_waiting_or_in_work(db, q):
    counts = ("ready", "delayed", "waiting", "in_work", "exact")
    assert told(q, *counts, "oldest_seconds") == [(0, 0, 0, 0, True, None)]
    first = queues.post(q, 1)
    queues.post(q, 2)
    queues.post(q, 3, delay="1 hour")
    queues.post(q, 4, after=[first])
    assert told(q, *counts) == [(2, 1, 1, 0, True)]
    with ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(1)
        # The claim has moved waiting messages out of the log.
        assert told(q, *counts) == [(1, 1, 1, 1, True)]
        assert 0 < told(q, "oldest_seconds")[0][0] < 60
        transaction.ack()
    assert told(q, *counts) == [(2, 1, 0, 0, True)]


def test_each_consumer_has_its_own_copies_and_what_is_dead_is_the_queues(db, q):
    queues.consumer(q, "few", "(t.properties->'kind') = 'rare'")
    queues.make(q, "q_2")
    queues.post(q, 1)
    queues.post(q, 2, kind="rare")
    q.execute("select mbus.post_dmq('n=>3', iid => mbus.get_iid('q'))")
    q.execute("select mbus.post_dmq('n=>4', iid => mbus.get_iid('q_2'))")
    assert told(q, "qname", "consumer", "selector is null", "ready", "dead", "parts") == [
        ("q", "default", True, 2, 1, 4),
        ("q", "few", False, 1, 1, 4),
        ("q_2", "default", True, 0, 1, 4),
    ]


def test_more_than_is_counted_is_told_to_be_more(q):
    for _ in range(3):
        q.execute("select mbus.post_dmq('n=>3', iid => mbus.get_iid('q'))")
        queues.post(q, 1, delay="1 hour")
    assert queues.consumen(q, 20) == []
    assert told(q, "delayed", "exact", "dead", "dead_exact", upto=3) == [(3, True, 3, True)]
    assert told(q, "delayed", "exact", "dead", "dead_exact", upto=1) == [(2, False, 1, False)]


def test_a_batch_that_was_given_up_is_among_the_dead(db, q):
    queues.fill(q, range(5))
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(2)
        raise ZeroDivisionError
    assert told(q, "ready", "in_work", "dead") == [(5, 0, 0)]
    manual_operations.skip_batch(q, q, FEED, "no use")
    assert told(q, "ready", "in_work", "dead") == [(3, 0, 2)]


def test_a_role_with_one_consumer_sees_only_the_counts_of_that_consumer(owner, role, connect_to):
    who = role("user")
    owner.execute(f"grant mbus_{owner.info.dbname}_consume_q_by_other to {who.name}")
    assert told(connect_to(who.conninfo), "qname", "consumer") == [("q", "other")]


def test_dead_messages_are_counted_along_an_index_up_to_a_number(q):
    q.execute("""
        set session_replication_role = replica;
        insert into mbus.dmq (iid) select 'r.' || n from generate_series(1, 20000) as n;
        insert into mbus.dmq (iid) select 'q.' || n from generate_series(1, 20000) as n;
        analyze mbus.dmq
    """)
    with q.transaction():
        assert told(q, "dead", "dead_exact", upto=10) == [(10, False)]
        read = q.execute(
            "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relid = 'mbus.dmq'::regclass"
        ).fetchone()
    assert read == (0, 11)
