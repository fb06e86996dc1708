"""The feed of a queue's consumer under the consumer transaction."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.errors import InvalidArgument, StaleClaim, UnknownConsumer
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.feeds.feed import Feed, partitions
from airflow_pgchange.feeds.feed_kinds import from_json, from_uri, to_json, to_uri
from airflow_pgchange.feeds.queries import ask
from tests import queues
from tests.batches import taken
from tests.waiting import locks, until, waits

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]

FEED = QueueFeed("q")


@pytest.fixture
def connection(connect):
    connection = connect()
    queues.make(connection)
    return connection


def numbers(changes):
    return [change.data["data"]["n"] for change in changes]


def work(db, limit=1000, feed=FEED, write=None, results=None):
    return numbers(taken(feed, results or db, db, limit, write))


def fail(db, limit=1000):
    """Claim a batch, fail, and return the batch."""
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(limit)
        raise ZeroDivisionError("poison")
    return batch


def test_a_queue_feed_keeps_the_contract():
    assert isinstance(FEED, Feed)
    assert from_json(to_json(FEED)) == FEED
    assert from_uri(to_uri(FEED, "shop")) == (FEED, "shop")


@pytest.mark.parametrize("arguments", [("",), ("q", ""), (None,), ("q", 3)])
def test_a_feed_of_nonsense_is_refused(arguments):
    with pytest.raises(InvalidArgument):
        QueueFeed(*arguments)


@pytest.mark.parametrize(
    ("feed", "message"),
    [(QueueFeed("no"), "Unknown queue:no"), (QueueFeed("q", "no"), "unknown consumer:no")],
)
def test_an_unknown_queue_or_consumer_is_named(db, connection, feed, message):
    with pytest.raises(UnknownConsumer, match=message), ConsumerTransaction(feed, db):
        pass


def test_a_drain_receives_every_message_once(db, connection):
    queues.fill(connection, range(2500))
    found: list[str] = []

    def process(transaction, batch):
        found.extend(numbers(transaction.changes()))
        transaction.ack()

    drained = drain(Plan(FEED, db, limit=1000, max_batches=None), process)
    assert (drained.batches, drained.changes) == (3, 2500)
    assert sorted(map(int, found)) == list(range(2500))
    assert queues.there(connection) == []


def test_a_message_comes_with_all_that_was_posted(db, connection):
    iid = connection.execute(
        "select mbus.post('q', 'a=>1, b=>NULL', properties => 'kind=>x', expires => 'infinity')"
    ).fetchone()[0]
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        (change,) = consumer.changes()
        consumer.ack()
    assert change.id == iid
    assert change.data["data"] == {"a": "1", "b": None}
    assert change.data["properties"] == {"kind": "x"}
    assert change.data["headers"]["destination"] == "q"


def test_many_messages_come_in_slices_that_are_the_batch(db, connection):
    queues.fill(connection, range(25_000))
    with ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(100_000)
        assert [part.count for part in batch.slices] == [10_000, 10_000, 5_000]
        assert sum(1 for _ in consumer.changes()) == batch.count == 25_000
        assert len(partitions(FEED, batch, 2)) == 2
        consumer.ack()
    assert queues.there(connection) == []


def test_at_work_the_transaction_holds_one_lock_and_no_xid(db, connection):
    queues.fill(connection, range(100))
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(100)
        pid = consumer.connection.info.backend_pid
        assert sorted(locks(connection, pid)) == [
            (pid, "advisory", "ExclusiveLock"),
            (pid, "virtualxid", "ExclusiveLock"),
        ]
        state = connection.execute(
            "select backend_xid, backend_xmin from pg_stat_activity where pid = %s", [pid]
        ).fetchone()
        assert state == (None, None)
        consumer.ack()


def test_others_skip_what_is_claimed(db, connection):
    queues.fill(connection, range(4))
    with ConsumerTransaction(FEED, db) as first, ConsumerTransaction(FEED, db) as second:
        first.claim(2)
        second.claim(1)
        assert queues.drain(connection) == ["3"]
        assert (numbers(first.changes()), numbers(second.changes())) == (["0", "1"], ["2"])
        second.ack()
        first.ack()
    assert queues.there(connection) == []


def test_a_message_that_was_acked_out_of_order_does_not_come_again(db, connect):
    """The message becomes due and is acked out of order, before the consumer's position has reached it."""
    connection = connect()
    queues.make(connection, parts=1)
    for n in ("far", "further"):
        queues.post(connection, n, delay="1h")
    queues.fill(connection, range(2))
    queues.post(connection, "due", delay="200ms")
    assert work(db, 1) == ["0"]
    connection.execute(
        "select pg_sleep_until(max(delayed_until)) from mbus.\"log$q\" where data -> 'n' = 'due'"
    )
    received = [*work(db, 1), *work(db, 1), *work(db, 1)]
    assert sorted(received) == ["1", "due"]


def test_a_batch_that_one_worker_is_taking_over_is_passed_over_by_another(db, connection, connect):
    queues.fill(connection, [1])
    keepers = [connect(autocommit=False) for _ in range(2)]
    assert all(ask(keeper, FEED.lock()) for keeper in keepers)
    left = fail(db)
    queues.fill(connection, [2])
    first, second = connect(autocommit=False), connect()
    second.execute("set lock_timeout = '10s'")
    claimed = [
        ask(session, FEED.claim(ask(keeper, FEED.position()), 1, None, None))
        for session, keeper in zip((first, second), keepers, strict=True)
    ]
    assert (claimed[0]["id"], claimed[0]["attempt"]) == (left.id, 2)
    assert claimed[1]["attempt"] == 1


def test_a_retry_is_the_same_batch_though_more_has_come(db, connection):
    queues.fill(connection, range(3))
    first = fail(db)
    queues.fill(connection, [3])
    assert queues.drain(connection) == ["3"]
    with ConsumerTransaction(FEED, db) as consumer:
        again = consumer.claim(1000)
        assert (again.id, again.count, again.attempt) == (first.id, 3, 2)
        assert numbers(consumer.changes()) == ["0", "1", "2"]
        consumer.ack()


def test_a_batch_that_was_claimed_again_is_not_acked_by_its_earlier_attempt(db, connection):
    queues.fill(connection, range(3))
    first = fail(db)
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.claim(1000).attempt == 2
        with pytest.raises(psycopg.Error, match="no longer as it was claimed"):
            connection.execute(FEED.ack(first))
        consumer.ack()
    assert queues.there(connection) == []


def test_messages_of_a_killed_worker_come_once_to_another_worker(db, connection):
    queues.fill(connection, range(3))
    with pytest.raises(psycopg.OperationalError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)
        pid = consumer.connection.info.backend_pid
        assert connection.execute("select pg_terminate_backend(%s, 5000)", [pid]).fetchone() == (True,)
        consumer.ack(lambda kept: kept.execute("create table kept ()"))
    assert connection.execute("select to_regclass('kept')").fetchone() == (None,)
    assert work(db) == ["0", "1", "2"]
    assert work(db) == []


def test_results_and_receipt_are_one_transaction(db, connection):
    queues.fill(connection, range(3))
    connection.execute("create table result (n int)")

    def write(kept):
        kept.execute("insert into result select 1")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work(db, write=write)
    assert connection.execute("select count(*) from result").fetchone() == (0,)
    assert len(queues.there(connection)) == 3
    work(db, write=lambda kept: kept.execute("insert into result select 1"))
    assert connection.execute("select count(*) from result").fetchone() == (1,)


def test_results_may_be_in_another_database(db, other_db, connection):
    queues.fill(connection, range(3))
    write = "create table result as select 1"
    assert work(db, results=other_db, write=lambda kept: kept.execute(write)) == ["0", "1", "2"]
    assert work(db, results=other_db) == []


def test_each_consumer_has_its_own_copy(db, connection):
    queues.consumer(connection, "even", "(t.data->'n')::int % 2 = 0")
    queues.fill(connection, range(4))
    assert work(db) == ["0", "1", "2", "3"]
    assert work(db, feed=QueueFeed("q", "even")) == ["0", "2"]
    assert queues.there(connection) == []


def test_a_claimed_message_is_not_received_until_the_ack(db, connection):
    queues.make(connection, "after")
    first = queues.post(connection, 1)
    queues.post(connection, 2, "after", after=[first])
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        assert queues.there(connection) == ["1"]
        assert queues.consume(connection, queue="after") is None
        consumer.ack()
    assert queues.consume(connection, queue="after") == "2"


def test_a_message_and_its_successor_are_never_in_one_batch(db, connection):
    first = queues.post(connection, 1)
    queues.post(connection, 2, after=[first])
    assert [work(db), work(db), work(db)] == [["1"], ["2"], []]


def test_taking_waits_for_the_batch_that_has_the_message(db, connection, connect):
    iid = queues.post(connection, 1)
    other = connect()
    taken: list[object] = []
    taker = threading.Thread(target=lambda: taken.append(queues.take(other, iid)))
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        taker.start()
        until(connection, waits(other, "advisory"))
        consumer.ack()
    taker.join()
    assert taken == [None]


class Worker:
    """Do the work of a feed's worker step by step, so that the test decides when its claim is committed."""

    def __init__(self, connect):
        self.own, self.claims = connect(autocommit=False), connect(autocommit=False)

    def claim(self):
        queues.one(self.own, "select mbus.take_lock('q', 'default')")
        position = queues.one(self.own, "select mbus.position('q', 'default')")
        query = "select mbus.claim('q', 'default', %s, 1)"
        self.batch = queues.one(self.claims, query, Jsonb(position))

    def ack(self):
        queues.one(self.own, "select mbus.ack('q', 'default', %s)", Jsonb(self.batch))
        self.own.commit()


@contextmanager
def taking(connect, iid):
    """Receive a message in a thread. Return its session, and the result."""
    session = connect()
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(queues.take(session, iid)))
    thread.start()
    yield session.info.backend_pid, taken
    thread.join()


def test_taking_waits_for_the_batch_into_which_the_message_is_being_claimed(connection, connect):
    iid = queues.post(connection, 1)
    worker = Worker(connect)
    worker.claim()
    with taking(connect, iid) as (pid, taken):
        until(connection, waits(pid, "advisory"))
        worker.claims.commit()
        until(connection, waits(pid, key="mbus.lock_key('q', 'default', 0)"))
        worker.ack()
    assert taken == [None]


def test_a_message_of_a_batch_that_changes_hands_is_taken_or_acked_and_not_both(connection, connect):
    iid = queues.post(connection, 1)
    other, first, second, stopping = (
        Worker(connect),
        Worker(connect),
        Worker(connect),
        connect(autocommit=False),
    )
    queues.one(other.own, "select mbus.take_lock('q', 'default')")
    first.claim()
    first.claims.commit()
    for killed in (first, other):
        killed.own.rollback()
    second.claim()
    stopping.execute("lock table mbus.receipt in share mode")
    with taking(connect, iid) as (pid, taken):
        until(connection, waits(pid, "relation"))
        second.claims.commit()
        second.own.execute("set local lock_timeout = '1s'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.ack()
        stopping.commit()
    assert taken == ["1"]


def test_a_batch_of_which_a_message_was_taken_is_another_batch(db, connection):
    iids = queues.fill(connection, range(3))
    first = fail(db)
    assert queues.take(connection, iids[1]) == "1"
    with ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(1000)
        assert batch.id != first.id
        assert (numbers(consumer.changes()), batch.attempt) == (["0", "2"], 1)
        consumer.ack()


@pytest.mark.parametrize("take", ["mbus.take", "mbus.take_from_q_by_default"])
def test_a_batch_of_which_its_own_transaction_took_a_message_is_acked(db, connection, take):
    iids = queues.fill(connection, range(3))
    assert work(db, write=lambda kept: queues.one(kept, f"select {take}(%s)", iids[1])) == ["0", "1", "2"]
    assert (work(db), queues.there(connection)) == ([], [])


def test_a_message_that_was_taken_from_its_own_batch_is_put_back_under_its_iid(db, connection):
    iids = queues.fill(connection, range(3))

    def put_back(kept):
        assert queues.take(kept, iids[1]) == "1"
        queues.post(kept, 1, iid=iids[1])

    assert work(db, write=put_back) == ["0", "1", "2"]
    assert [work(db), work(db)] == [["1"], []]


def test_a_batch_whose_transaction_took_a_message_and_failed_comes_again_whole(db, connection):
    iids = queues.fill(connection, range(3))
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        first = consumer.claim(10)
        queues.take(consumer.connection, iids[1])
        raise ZeroDivisionError
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.claim(10).id == first.id
        assert numbers(consumer.changes()) == ["0", "1", "2"]
        consumer.ack()


def test_a_batch_of_which_a_message_was_taken_is_given_up_without_it(db, connection):
    iids = queues.fill(connection, range(3))
    fail(db)
    assert queues.take(connection, iids[1]) == "1"
    connection.execute("select mbus.skip_batch('q', 'default', 'no use')")
    assert connection.execute("select iid from mbus.dmq order by id").fetchall() == [(iids[0],), (iids[2],)]
    assert queues.one(connection, "select changes from pgchange.letters()") == 2
    assert work(db) == []


def test_a_message_that_was_taken_and_deleted_while_somebody_met_it_is_in_no_batch(db, connection, connect):
    iid = queues.post(connection, 1)
    taker, other = connect(autocommit=False), connect(autocommit=False)
    assert queues.take(taker, iid) == "1"
    assert queues.consume(other) is None
    taker.commit()
    connection.execute("select mbus.maintain()")
    other.commit()
    queues.post(connection, 2)
    connection.execute("select pg_sleep(0.03)")
    assert work(db) == ["2"]


@pytest.mark.parametrize("limit", [1, 10])
def test_a_batch_of_which_a_message_was_deleted_while_it_was_claimed_is_another_batch(
    db, connection, connect, limit
):
    iid = queues.post(connection, 1, expires="0.5s")
    keeper, claimer = connect(autocommit=False), connect(autocommit=False)
    keeper.execute("select mbus.take_lock('q', 'default')")
    (position,) = keeper.execute("select mbus.position('q', 'default')::text").fetchone()
    claimer.execute("select mbus.claim('q', 'default', %s, %s)", [position, limit])
    connection.execute(
        "select pg_sleep(extract(epoch from expires - localtimestamp) + 0.01) from mbus.peek(%s)", [iid]
    )
    connection.execute("select mbus.maintain()")
    claimer.commit()
    keeper.rollback()
    queues.post(connection, 2)
    assert work(db) == ["2"]
    assert connection.execute("select count(*) from mbus.apart").fetchone() == (0,)


def test_a_message_is_put_back_with_the_progress_under_its_iid(db, connection):
    iid = queues.post(connection, 1)
    successor = queues.post(connection, 2, after=[iid])
    assert successor != iid
    assert work(db, write=lambda kept: queues.post(kept, 1, iid=iid)) == ["1"]
    assert [work(db), work(db), work(db)] == [["1"], ["2"], []]


def test_an_ack_of_a_dropped_consumer_commits_nothing(db, connection):
    queues.consumer(connection, "extra")
    queues.fill(connection, range(3))
    feed = QueueFeed("q", "extra")
    with pytest.raises((StaleClaim, UnknownConsumer)), ConsumerTransaction(feed, db) as consumer:
        consumer.claim(1000)
        connection.execute("select mbus.drop_consumer('extra', 'q')")
        consumer.ack(lambda kept: kept.execute("create table kept ()"))
    assert connection.execute("select to_regclass('kept')").fetchone() == (None,)


def test_clearing_leaves_what_is_claimed(db, connection):
    queues.post(connection, 1)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        connection.execute("update mbus.\"log$q\" set expires = now() - interval '1 hour'")
        connection.execute("select mbus.clear_queue_q()")
        assert numbers(consumer.changes()) == ["1"]
        consumer.ack()
    assert queues.there(connection) == []


@pytest.mark.parametrize("taker", ["another", "the worker itself"])
def test_a_split_is_over_where_a_message_of_its_later_parts_is_taken(db, connection, taker):
    iids = queues.fill(connection, range(6))
    with suppress(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        whole = consumer.claim(10)
        raise ZeroDivisionError("poison")
    with ConsumerTransaction(FEED, db) as consumer:
        half = consumer.claim(10, 1, split=True)
        assert (half.parts_of, numbers(consumer.changes())) == ((whole.id,), ["0", "1", "2"])
        consumer.ack(lambda own: queues.take(own, iids[4]) if taker == "the worker itself" else None)
    if taker == "another":
        assert queues.take(connection, iids[4]) == "4"
    with ConsumerTransaction(FEED, db) as consumer:
        rest = consumer.claim(10)
        assert (rest.parts_of, numbers(consumer.changes())) == ((), ["3", "5"])
        consumer.ack()
    assert queues.there(connection) == []


def test_a_letter_of_a_part_is_without_the_messages_that_others_took(db, connection):
    iids = queues.fill(connection, range(4))
    with suppress(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        raise ZeroDivisionError("poison")
    with suppress(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        assert consumer.claim(10, 1, split=True).count == 2
        raise ZeroDivisionError("poison")
    assert queues.take(connection, iids[0]) == "0"
    manual_operations.skip_batch(connection, connection, FEED, "no use")
    assert [letter.changes for letter in dead_letters.letters(connection)] == [1]
    assert work(db) == ["2", "3"]
