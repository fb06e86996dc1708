"""Queues that were dumped and restored into clusters with other transaction ids."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import consumers
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from tests.queues import consume, drain, fill, make, one, post, there

pytestmark = pytest.mark.hstore


def use_up(connection, upto):
    """Use transaction ids until the next is at least ``upto``."""
    connection.execute(
        f"do $$ begin while pg_current_xact_id()::text::bigint < {upto - 1} loop commit; end loop; end $$"
    )


@pytest.fixture
def q(connect):
    """A queue of one part, in a cluster whose transaction ids are higher than those of a new cluster after a restore. A
    restore uses some thousands of ids."""
    connection = connect()
    make(connection, parts=1)
    use_up(connection, one(connection, "select pg_current_xact_id()::text::bigint") + 10_000)
    return connection


def test_a_restored_queue_hands_out_nothing_and_says_so_until_it_is_rebased(q, restored):
    fill(q, [1, 2])
    here = restored()
    told = "select ready, exact, trouble ~ 'restored from a dump' from mbus.queues()"
    assert here.execute(told).fetchall() == [(None, None, True)]
    make(here, "made_since")
    for row in consumers.status(here):
        assert (row["ready"], row["waiting"]) == (None, None)
        assert "restored from a dump" in row["held_back_by"]
    post(here, 3)
    for call in ("mbus.consume('q')", "mbus.consumen_q_by_default(2)", "mbus.lag('q', 'default', 9)"):
        with pytest.raises(psycopg.Error, match="restored from a dump") as refused:
            here.execute(f"select {call}")
        assert refused.value.sqlstate == "PC004"
    assert one(here, "select mbus.rebase_after_restore()") == 2
    assert one(here, "select mbus.rebase_after_restore()") == 0
    assert [(row["ready"], row["held_back_by"]) for row in consumers.status(here)] == [
        (0, None),
        (3, None),
    ]
    assert drain(here) == ["1", "2", "3"]


def test_a_restored_queue_goes_on_where_it_was_and_loses_nothing(q, restored, connect):
    slow, slower = connect(autocommit=False), connect(autocommit=False)
    post(slow, "late")
    post(slower, "later")
    fill(q, [1, 2])
    assert drain(q) == ["1", "2"]
    slow.commit()
    slower.commit()
    first = post(q, "first")
    post(q, "second", after=[first])
    here = restored()
    here.execute("select mbus.rebase_after_restore()")
    assert there(here) == ["late", "later", "first", "second"]
    assert drain(here) == ["late", "later", "first", "second"]
    here.execute("select mbus.maintain()")
    assert there(here) == []


def test_a_restored_queue_that_is_ordered_by_a_property_keeps_the_order_of_each_key(q, db, restored, connect):
    """Three messages: the first is in a failed batch, the second waits for it because of its key, and the third was
    committed late."""
    q.execute("select mbus.order_by('q', 'kind')")
    late = connect(autocommit=False)
    post(late, "a1", kind="a")
    post(q, "b1", kind="b")
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(QueueFeed("q"), db) as consumer:
        assert [change.data["data"]["n"] for change in consumer.claim(1) and consumer.changes()] == ["b1"]
        raise ZeroDivisionError
    post(q, "b2", kind="b")
    late.commit()
    post(q, "a2", kind="a")
    here = restored()
    here.execute("select mbus.rebase_after_restore()")
    post(here, "b3", kind="b")
    post(here, "a3", kind="a")
    done = []
    while True:
        with ConsumerTransaction(QueueFeed("q"), here.info.dsn) as consumer:
            if consumer.claim(2) is None:
                break
            done += [change.data["data"]["n"] for change in consumer.changes()]
            consumer.ack()
    assert [each for each in done if each[0] == "a"] == ["a1", "a2", "a3"]
    assert [each for each in done if each[0] == "b"] == ["b1", "b2", "b3"]


def test_a_restored_queue_doubles_nothing_where_its_transaction_ids_come_again(q, restored, connect_to):
    with q.transaction():
        old = one(q, "select pg_current_xact_id()::text::bigint")
        post(q, "received")
    assert drain(q) == ["received"]
    here = restored()
    here.execute("select mbus.rebase_after_restore()")
    use_up(here, old)
    same = connect_to(here.info.dsn, autocommit=False)
    assert one(same, "select pg_current_xact_id()::text::bigint") == old
    post(here, "new")
    assert drain(here) == ["new"]
    same.commit()
    assert consume(here) is None


def test_a_batch_that_is_claimed_after_a_restore_has_an_id_of_its_own(own_database, own_cluster, connect_to):
    queue = connect_to(own_database)
    make(queue)
    fill(queue, [1])
    copy = own_cluster.backup()
    try:
        copy.start()
        ids = []
        for database in (own_database, copy.conninfo()):
            with pytest.raises(ZeroDivisionError), ConsumerTransaction(QueueFeed("q"), database) as consumer:
                ids.append(consumer.claim(9).id)
                raise ZeroDivisionError
        assert ids[0] != ids[1]
    finally:
        copy.remove()
