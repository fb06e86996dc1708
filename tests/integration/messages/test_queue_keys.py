"""A queue that is ordered by a property: messages with equal keys go to one worker of a consumer at a time, in order.
Other keys are not delayed."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psycopg
import pytest

from airflow_pgchange.errors import Refused
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.draining import Plan
from airflow_pgchange.feeds.draining import drain as drain_plan
from airflow_pgchange.feeds.error_translation import translated
from tests import queues
from tests.queues import one, post

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]

FEED = QueueFeed("q")


def make_keyed(connection):
    """Create the queue q, whose messages with the same value of the property kind are received in order."""
    queues.make(connection)
    connection.execute("select mbus.order_by('q', 'kind')")


@pytest.fixture
def prepared_keyed():
    return make_keyed


@pytest.fixture
def keyed(prepared_keyed, connect):
    """A connection to a database with such a queue."""
    return connect()


@contextmanager
def worker(db, limit=100, feed=FEED):
    """A worker with the next batch. Yield the key and the number of each message. It acks at the end of the block."""
    with ConsumerTransaction(feed, db) as consumer:
        if consumer.claim(limit) is None:
            yield []
        else:
            yield [of(change.data) for change in consumer.changes()]
            consumer.ack()


def of(data):
    return (data["properties"]["kind"] or "") + data["data"]["n"]


def fill(connection, *messages):
    """Post messages, each given as a key of one letter and a number."""
    for each in messages:
        post(connection, each[1:], kind=each[0])


def work(db, limit=100):
    with worker(db, limit) as found:
        return found


def drain(db, limit=100):
    """Process batches until nothing is ready, and return them."""
    batches = []
    while found := work(db, limit):
        batches.append(found)
    return batches


def consume(connection, amount):
    found = connection.execute(
        "select properties -> 'kind', data -> 'n' from mbus.consumen_q_by_default(%s)", [amount]
    )
    return [key + number for key, number in found]


def test_a_key_that_is_in_work_is_passed_over_and_others_are_not(db, keyed):
    fill(keyed, "a1", "b1", "a2")
    with worker(db) as first:
        assert first == ["a1", "b1", "a2"]
        fill(keyed, "a3", "c1", "b2", "c2", "a4")
        with worker(db) as second:
            assert second == ["c1", "c2"]
            assert work(db) == []
    assert drain(db) == [["a3", "b2", "a4"]]
    assert queues.there(keyed) == []


def test_messages_that_waited_for_their_key_come_together_up_to_the_limit(db, keyed):
    fill(keyed, "a0")
    with worker(db):
        fill(keyed, *(f"a{n}" for n in range(1, 8)), "b1", "b2")
        assert work(db, 9) == ["b1", "b2"]
    fill(keyed, "a8", "b3")
    assert drain(db, 4) == [["a1", "a2", "a3", "a4"], ["a5", "a6", "a7", "b3"], ["a8"]]


def test_a_batch_that_failed_keeps_its_keys_until_it_is_done(db, keyed):
    fill(keyed, "a1", "b1")
    with pytest.raises(ZeroDivisionError), worker(db, 1) as found:
        assert found == ["a1"]
        raise ZeroDivisionError
    fill(keyed, "a2")
    # Another worker takes over the batch of a worker that is gone.
    with worker(db) as adopted:
        assert adopted == ["a1"]
        assert work(db) == ["b1"]
    assert work(db) == ["a2"]


def test_messages_without_a_key_are_handed_out_as_ever(db, keyed):
    post(keyed, 1)
    fill(keyed, "a1")
    with worker(db) as first:
        post(keyed, 2)
        assert (first, work(db)) == (["1", "a1"], ["2"])


@pytest.mark.parametrize("amount", [1, 10])
def test_consumers_in_sql_keep_the_order_of_a_key(db, keyed, connect, amount):
    other = connect()
    fill(keyed, *(f"a{n}" for n in range(3)))
    with keyed.transaction():
        first = consume(keyed, amount)
        assert first == ["a0", "a1", "a2"][:amount]
        assert consume(other, 10) == []
        fill(other, "b1")
    assert sorted(consume(other, 10)) == sorted([*["a0", "a1", "a2"][amount:], "b1"])


def test_a_key_that_a_worker_has_is_passed_over_by_consumers_in_sql(db, keyed):
    fill(keyed, "a1")
    with worker(db):
        fill(keyed, "a2", "b1")
        assert consume(keyed, 10) == ["b1"]
        assert consume(keyed, 1) == []
    assert consume(keyed, 1) == ["a2"]


def test_a_message_waits_for_one_of_its_key_that_is_delayed_or_behind_another(db, keyed):
    iid = post(keyed, 0, kind="z")
    delayed = post(keyed, 1, kind="a", delay="1 hour")
    fill(keyed, "a2", "b1")
    post(keyed, 1, kind="c", after=[iid])
    fill(keyed, "c2")
    assert work(db) == ["z0", "b1"]
    assert drain(db) == [["c1", "c2"]]
    assert one(keyed, "select data -> 'n' from mbus.take(%s)", delayed) == "1"
    assert drain(db) == [["a2"]]


def test_a_message_does_not_wait_for_one_that_expired(db, keyed):
    post(keyed, 1, kind="a", delay="1 hour", expires="2 s")
    fill(keyed, "a2")
    assert work(db) == []
    time.sleep(2)
    assert drain(db) == [["a2"]]


def test_a_batch_that_is_dissolved_keeps_the_order(db, keyed):
    fill(keyed, "a1")
    iid = post(keyed, 2, kind="a")
    fill(keyed, "a3", "a4")
    with pytest.raises(ZeroDivisionError), worker(db, 3):
        raise ZeroDivisionError
    assert one(keyed, "select data -> 'n' from mbus.take_from_q_by_default(%s)", iid) == "2"
    with worker(db, 1) as first:
        assert (first, work(db)) == (["a1"], [])
    assert drain(db) == [["a3", "a4"]]


def test_every_consumer_has_an_order_of_its_own(db, keyed):
    fill(keyed, "a1", "a2")
    assert work(db, 1) == ["a1"]
    fill(keyed, "b1")
    queues.consumer(keyed, "late")
    late = QueueFeed("q", "late")
    with worker(db, 1, late) as first:
        fill(keyed, "a3")
        with worker(db, 10, late) as second:
            assert (first, second) == (["a2"], ["b1"])
    with worker(db, 10, late) as third:
        assert third == ["a3"]


def test_a_skipped_batch_frees_its_keys(db, keyed):
    fill(keyed, "a1")
    with pytest.raises(ZeroDivisionError), worker(db):
        raise ZeroDivisionError
    fill(keyed, "a2")
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.give_up("cannot be done")
    assert work(db) == ["a2"]


def test_messages_that_wait_for_their_key_count_as_waiting(db, keyed):
    fill(keyed, "a1")
    with worker(db):
        fill(keyed, "a2", "b1")
        lag = one(keyed, "select mbus.lag('q', 'default', 10)")
        assert (lag["ready"], lag["waiting"]) == (1, 1)
        assert work(db) == ["b1"]
        lag = one(keyed, "select mbus.lag('q', 'default', 10)")
        assert (lag["ready"], lag["waiting"]) == (0, 1)
    assert one(keyed, "select mbus.lag('q', 'default', 10) -> 'ready'") == 1


KEYS, WORKERS, POSTED = "abcdefg", 3, 12


def post_in_turn(db, keys, posted):
    """Post the messages of a key in one transaction after another, so that their order is known."""
    with psycopg.connect(db, autocommit=True) as connection:
        for n in range(*posted):
            with connection.transaction():
                for key in keys:
                    post(connection, n, kind=key)


def work_at_random(db, number, at_work, log, rounds):
    """Claim a few messages at a time, and sometimes fail. Return the keys that another worker had at the same time."""
    chance, wrong = random.Random(number), []
    while len(log) < len(KEYS) * POSTED and not any(wrong):
        with suppress(ZeroDivisionError), worker(db, chance.randint(1, 6)) as found:
            at_work[number] = {each[0] for each in found}
            rounds.wait()
            wrong = [at_work[number] & at_work[other] for other in at_work if other != number]
            failed = found and chance.random() < 0.1
            if not failed:
                log.extend(found)
            rounds.wait()
            if failed:
                raise ZeroDivisionError
    rounds.abort()
    return wrong


def campaign(db):
    """Let posters and workers work at once.

    Return the violations of the order, and the messages in the order of receipt.

    Each worker claims at its own speed, and waits for the other workers before it acks.
    """
    at_work, log, rounds = {}, [], threading.Barrier(WORKERS, timeout=30)
    post_in_turn(db, KEYS, (0, POSTED // 2))
    with ThreadPoolExecutor() as pool:
        posting = [
            pool.submit(post_in_turn, db, keys, (POSTED // 2, POSTED)) for keys in (KEYS[::2], KEYS[1::2])
        ]
        working = [pool.submit(work_at_random, db, n, at_work, log, rounds) for n in range(WORKERS)]
        for each in posting:
            each.result()
        wrong = []
        for each in working:
            with suppress(threading.BrokenBarrierError):
                wrong += filter(None, each.result())
    return wrong, log


def test_no_key_is_with_two_workers_at_once_nor_out_of_order(db, keyed):
    wrong, log = campaign(db)
    assert wrong == []
    for key in KEYS:
        assert [int(each[1:]) for each in log if each[0] == key] == list(range(POSTED)), key


def test_the_campaign_catches_a_queue_without_order(db, connect):
    queues.make(connect())
    assert campaign(db)[0] != []


def test_only_an_empty_queue_is_ordered(db, connect):
    connection = connect()
    queues.make(connection)
    post(connection, 1, kind="a")
    with pytest.raises(Refused, match="queue q cannot be ordered: it has messages"), translated():
        connection.execute("select mbus.order_by('q', 'kind')")
    consume(connection, 10)
    connection.execute("select mbus.order_by('q', 'kind'); select mbus.order_by('q', 'kind')")
    assert one(connection, "select ordered_by from mbus.queue") == "kind"
    connection.execute("select mbus.order_by('q', null)")
    assert one(connection, "select count(*) from pg_trigger where tgname = 'keyed'") == 0
    fill(connection, "a1", "a2")
    with worker(db, 1), worker(db) as second:
        assert second == ["a2"]


def test_a_queue_that_had_no_trigger_is_ordered_and_copied_without_a_notice(connect):
    connection = connect()
    notices: list[str | None] = []
    connection.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    connection.execute("select mbus.create_queue('q', 2), mbus.create_queue('r', 2)")
    connection.execute("select mbus.order_by('q', 'kind'), mbus.create_trigger('q', 'r')")
    assert notices == []


def test_a_queue_that_is_made_anew_keeps_its_order(db, keyed):
    queues.make(keyed)
    fill(keyed, "a1", "a2")
    with worker(db, 1):
        assert work(db) == []
    keyed.execute("select mbus.drop_queue('q')")
    assert one(keyed, "select count(*) from pg_proc where proname ~ '^key[$]'") == 0


def test_messages_behind_a_bad_one_of_their_key_wait_until_it_is_a_letter(keyed, db):
    """They wait even if they are in another part of the batch that is split: no other worker gets them earlier."""
    fill(keyed, "a0", "a1", "b2", "a3")
    plan = Plan(FEED, db, max_batches=None, max_attempts=1)
    done = []

    def process(transaction, batch):
        found = [of(change.data) for change in transaction.changes()]
        if batch.is_part and len(found) == 2 and not done:
            fill(keyed, "a4", "c5")
            assert work(db) == ["c5"]
        if "a0" in found:
            raise ZeroDivisionError("poison")
        transaction.ack()
        done.extend(found)

    drained = drain_plan(plan, process)
    assert done == ["a1", "b2", "a3", "a4"]
    assert len(drained.letters) == 1
