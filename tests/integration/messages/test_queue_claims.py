"""The locks of a claim, and the messages of late transactions and of its own transaction that it finds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_pgchange.feeds import QueueFeed
from tests.acks import only_the_claimed_version_is_acked
from tests.limits import shorten
from tests.queues import consume, consumen, consumer, drain, fill, make, one, post, take, there
from tests.waiting import locks, until, waits

pytestmark = pytest.mark.hstore


def test_a_claim_of_many_messages_holds_no_more_locks_than_parts(connect):
    connection = connect()
    make(connection, parts=8)
    fill(connection, range(2_000))
    reader = connect(autocommit=False)
    assert len(consumen(reader, 2_000)) == 2_000
    assert [lock.kind for lock in locks(connection, reader)].count("advisory") <= 8 + 1
    reader.rollback()
    for _ in range(300):
        assert consume(reader) is not None
    assert [lock.kind for lock in locks(connection, reader)].count("advisory") <= 64 + 3 * 8 + 1
    reader.rollback()
    assert len(drain(connection)) == 2_000


def test_a_session_with_a_message_keeps_no_session_from_other_messages(q, connect):
    fill(q, range(20))
    slow = connect(autocommit=False)
    assert consume(slow) == "0"
    assert drain(q, most=1) == [str(n) for n in range(1, 20)]
    slow.rollback()
    assert drain(q) == ["0"]


def test_a_session_with_a_message_does_not_keep_a_selector_from_other_parts(q, connect):
    """This holds even if the locked part has many messages in a row, which each claim finds first."""
    consumer(q, "all", "true")
    fill(q, range(200))
    slow = connect(autocommit=False)
    assert consume(slow, "all") == "0"
    assert drain(q, "all", most=1) == [str(n) for n in range(200) if n % 4]
    slow.rollback()
    assert len(drain(q, "all")) == 50


def test_a_session_with_a_message_does_not_keep_a_batch_from_other_parts(q, connect):
    fill(q, range(80))
    slow = connect(autocommit=False)
    assert consume(slow) == "0"
    assert consumen(q, 1000) == [str(n) for n in range(80) if n % 4]
    # No part is free as a whole. A batch then has one message.
    assert consumen(q, 1000) == ["4"]
    fill(q, range(80, 84))
    assert consumen(q, 1000) == ["81", "82", "83"]


def test_a_session_with_a_message_does_not_block_waiting_messages_of_other_parts(q, connect):
    make(q, "r")
    first = post(q, "first", "r")
    for n in range(200):
        post(q, n, after=[first])
    assert drain(q) == []
    assert consume(q, queue="r") == "first"
    slow = connect(autocommit=False)
    assert consume(slow) == "0"
    assert sorted(drain(q, most=1), key=int) == [str(n) for n in range(200) if n % 4]


def test_a_late_message_is_received_although_later_messages_were(q, connect):
    slow, other = connect(autocommit=False), connect(autocommit=False)
    post(slow, "a1")
    post(q, "b1")
    post(other, "c1")
    assert drain(q) == ["b1"]
    post(slow, "a2")
    slow.commit()
    post(q, "b2")
    assert consumen(q, 2) == ["a1", "a2"]
    other.commit()
    assert drain(q) == ["c1", "b2"]
    assert drain(q) == []


def test_a_message_that_is_posted_between_the_looks_of_a_claim_is_not_missed(connect):
    q, receiving, pausing, late = connect(), connect(), connect(), connect(autocommit=False)
    # Both messages are in the same part, because a claim moves its positions only in the parts of its messages.
    make(q, parts=1)
    post(q, 1)
    # The claim pauses after it has determined its bound. Transactions with an id below it may still commit.
    shorten(
        q, "mbus.bound_now", "xid_bound() end", "xid_bound() end + length(pg_advisory_xact_lock(1)::text)"
    )
    pausing.execute("select pg_advisory_lock(1)")
    with ThreadPoolExecutor() as threads:
        received = threads.submit(consumen, receiving, 100)
        until(q, waits(receiving, behind=pausing))
        post(late, 2)
        pausing.execute("select pg_advisory_unlock(1)")
        assert received.result() == ["1"]
    late.commit()
    assert drain(q) == ["2"]


def test_a_late_message_is_kept_by_maintenance_until_it_is_received(q, connect):
    slow = connect(autocommit=False)
    post(slow, "late")
    fill(q, range(100))
    assert len(drain(q)) == 100
    slow.commit()
    assert there(q) == ["late"]
    q.execute("select mbus.maintain()")
    assert drain(q) == ["late"]


def test_a_late_message_comes_behind_older_messages_of_a_locked_part(q, connect):
    """The messages go to four parts in turn. A run of received messages is read as one range."""
    slow, holder = connect(autocommit=False), connect(autocommit=False)
    fill(q, range(4))
    assert consume(holder) == "0"
    post(q, 4)
    post(slow, 5)
    post(q, 6)
    assert consumen(q, 100) == ["1", "2", "3", "6"]
    post(q, 7)
    slow.commit()
    holder.commit()
    assert consumen(q, 100) == ["4", "5", "7"]


def test_late_messages_are_received_a_few_at_a_time(q, connect):
    slow, slower = connect(autocommit=False), connect(autocommit=False)
    fill(slow, range(50))
    fill(slower, range(100, 150))
    fill(q, range(1000, 1050))
    assert len(drain(q)) == 50
    slow.commit()
    found = [*consumen(q, 7), consume(q)]
    slower.commit()
    found += drain(q, most=7)
    assert sorted(found, key=int) == [str(n) for n in [*range(50), *range(100, 150)]]


def test_a_transaction_receives_what_it_posted_itself(q, connect):
    session = connect(autocommit=False)
    post(session, 1)
    assert consume(session) == "1"
    post(session, 2)
    post(session, 3)
    assert consumen(session, 10) == ["2", "3"]
    assert consume(session) is None
    session.commit()
    assert drain(q) == []
    post(session, 4)
    session.execute("savepoint s")
    assert consume(session) == "4"
    session.execute("rollback to s")
    session.commit()
    assert drain(q) == ["4"]


def test_a_repeatable_read_transaction_is_told_that_it_cannot_consume(q):
    q.execute("set default_transaction_isolation = 'repeatable read'")
    with pytest.raises(psycopg.Error, match="read committed"):
        consume(q)


@pytest.fixture
def crowd(connect):
    """A connection without autocommit to a queue q, whose 1,000 messages all wait for a message of r."""
    connection = connect(autocommit=False)
    make(connection, "q", "r")
    first = post(connection, 0, "r")
    connection.execute(
        "select mbus.post('q', 'n=>0', hstore('consume_after', %s)) from generate_series(1, 1000)", [first]
    )
    assert drain(connection) == []
    # Fix the random numbers: otherwise one claim in a hundred trims the queue, and reads thousands of rows for that.
    connection.execute("select setseed(0.5)")
    connection.commit()
    return connection


def rows_read(connection, table):
    """Return the number of rows of a table that this transaction has read so far."""
    query = "select idx_tup_fetch + seq_tup_read from pg_stat_xact_user_tables where relname = %s"
    return one(connection, query, table) or 0


def test_a_claim_does_not_walk_along_those_that_wait(crowd):
    crowd.execute("analyze mbus.apart")
    fill(crowd, range(10))
    crowd.commit()
    before = rows_read(crowd, "apart")
    assert len(consumen(crowd, 10)) == 10
    assert rows_read(crowd, "apart") - before < 300


def test_a_claim_that_finds_nothing_does_not_walk_along_those_that_wait(crowd):
    """It examines only some of the waiting messages, in case nobody has woken them."""
    before = rows_read(crowd, "apart")
    assert drain(crowd) == []
    assert rows_read(crowd, "apart") - before < 300


def test_a_claim_does_not_walk_along_those_that_were_received_out_of_order(connect):
    connection = connect(autocommit=False)
    make(connection, "q", "r")
    post(connection, 1, after=[post(connection, 0, "r")])
    assert drain(connection) == []
    connection.execute(
        "insert into mbus.receipt (queue, id, consumer) select q.id, g, c.id "
        "from mbus.queue as q join mbus.consumer as c using (qname), generate_series(1000, 4000) as g where qname = 'r'"
    )
    connection.commit()
    connection.execute("analyze mbus.receipt, mbus.apart")
    assert consume(connection) is None
    assert rows_read(connection, "receipt") < 300


@pytest.mark.parametrize("expires", [None, "1h"])
def test_a_claim_does_not_walk_along_those_whose_time_has_not_come(connect, expires):
    """Post delayed messages, and messages that wait for another message until it expires at the latest."""
    connection = connect(autocommit=False)
    make(connection, "q", "r")
    first = None if expires is None else post(connection, 0, "r", expires=expires)
    connection.execute(
        "select mbus.post('q', 'n=>0', hstore('consume_after', %s), "
        "delayed_until => case when %s then localtimestamp + interval '1 hour' end) from generate_series(1, 1000)",
        [first, first is None],
    )
    assert drain(connection) == []
    fill(connection, range(11))
    # Fix the random numbers: otherwise one claim in a hundred trims the queue, and reads thousands of rows for that.
    connection.execute("select setseed(0.5)")
    connection.commit()
    before = rows_read(connection, "apart")
    assert len(consumen(connection, 10)) == 10
    assert consume(connection) == "10"
    assert rows_read(connection, "apart") - before < 300


@pytest.fixture
def received_long_ago(connect):
    """A connection without autocommit to a queue q with 1,000 messages.

    Each was received out of order, and another consumer keeps them in the log.
    """
    connection = connect(autocommit=False)
    make(connection)
    consumer(connection, "idle")
    fill(connection, range(1000))
    drain(connection, most=1000)
    connection.execute(
        "insert into mbus.receipt (queue, id, consumer) select q.id, l.id, c.id "
        "from mbus.queue as q join mbus.consumer as c using (qname), mbus.\"log$q\" as l where c.name = 'default'"
    )
    connection.commit()
    return connection


def test_a_claim_does_not_go_through_what_was_received_long_ago_while_others_write(
    received_long_ago, connect
):
    connection = received_long_ago
    slow = connect(autocommit=False)
    post(slow, "late")
    for n in range(2):
        fill(connection, range(10))
        connection.commit()
        before = rows_read(connection, "receipt")
        assert len(consumen(connection, 10)) == 10
        assert rows_read(connection, "receipt") - before < 300, n
        connection.commit()
    slow.commit()
    before = rows_read(connection, "receipt")
    assert drain(connection) == ["late"]
    assert rows_read(connection, "receipt") - before < 300


def test_a_stretch_that_was_taken_is_not_gone_through_for_each_message(connect):
    connection = connect()
    make(connection)
    iids = fill(connection, range(100))
    for iid in [*iids[10:40], iids[60]]:
        take(connection, iid)
    query = (
        "select array_agg(upper(r) - lower(r)) from mbus.queue as q join mbus.consumer as c using (qname), "
        "unnest(mbus.gone(q, c.id, 0)) as r"
    )
    assert one(connection, query) == [30, 1]
    assert len(drain(connection)) == 69


def test_a_take_does_not_walk_along_what_was_taken_before(connect):
    connection = connect(autocommit=False)
    make(connection)
    iids = fill(connection, range(3100))
    for iid in iids[:10]:
        take(connection, iid)
    connection.execute(
        'insert into mbus.receipt (queue, id) select q.id, l.id from mbus.queue as q, mbus."log$q" as l '
        "where l.id between 11 and 3010"
    )
    connection.commit()
    assert take(connection, iids[3050]) == "3050"
    assert rows_read(connection, "receipt") < 300


def test_trimming_does_not_walk_along_messages_that_all_wait(crowd):
    before = rows_read(crowd, "log$q")
    assert one(crowd, "select mbus.trim(q, 700) from mbus.queue as q where qname = 'q'") == 0
    assert rows_read(crowd, "log$q") - before < 300
    assert one(crowd, "select max(done) from mbus.position where consumer < 0") == 700


def test_a_batch_is_acked_as_the_version_that_was_claimed(q, db):
    only_the_claimed_version_is_acked(lambda: post(q, 1), QueueFeed("q"), db)
