"""Single messages: the position of the next search is recorded. Each message comes once, in whatever order transactions
end."""

from __future__ import annotations

import random
from contextlib import ExitStack

import psycopg
import pytest

from tests.queues import consume, consumen, consumer, drain, fill, make, one, post

pytestmark = pytest.mark.hstore

READ = (
    "select (sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) + sum(coalesce(idx_scan, 0)))::float8 "
    "from pg_stat_xact_user_tables where schemaname = 'mbus'"
)
"""Return the rows and index entries that this transaction has read in the tables of the queues."""


def singly(connection, name="default"):
    """Receive single messages until there are none."""
    found = []
    while (n := consume(connection, name)) is not None:
        found.append(n)
    return found


def look_in_vain(connection):
    """Receive in vain until the state of the log is recorded. Each call records it with a chance of one in four."""
    for _ in range(40):
        assert consume(connection) is None


@pytest.mark.parametrize(
    "call", ["select mbus.peek_q()", "select * from mbus.consume('q')"], ids=["peek", "consume"]
)
def test_a_look_at_an_empty_queue_costs_the_same_whatever_the_number_of_its_parts(connect, call):
    costs = []
    for parts in (1, 256):
        connection = connect(autocommit=False)
        make(connection, parts=parts)
        fill(connection, range(300))
        # Fix the random numbers, so that no claim trims the queue.
        connection.execute("select setseed(0.5)")
        assert len(singly(connection)) == 300
        fill(connection, range(5))
        assert len(singly(connection)) == 5
        look_in_vain(connection)
        before = one(connection, READ)
        connection.execute(call)
        costs.append(one(connection, READ) - before)
        connection.rollback()
    assert max(costs) < 10


def test_a_message_costs_the_same_whatever_the_number_of_parts(connect):
    costs = []
    for parts in (1, 256):
        connection = connect(autocommit=False)
        make(connection, parts=parts)
        fill(connection, range(600))
        for _ in range(300):
            consume(connection)
        before = one(connection, READ)
        for _ in range(100):
            consume(connection)
        costs.append((one(connection, READ) - before) / 100)
        connection.rollback()
    assert costs[1] < 1.5 * costs[0] < 150


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_message_that_is_held_for_long_does_not_block_other_messages(connect, end):
    connection, slow = connect(), connect(autocommit=False)
    make(connection, parts=4)
    fill(connection, range(200))
    assert consume(slow) == "0"
    assert singly(connection) == [str(n) for n in range(1, 200)]
    getattr(slow, end)()
    assert singly(connection) == (["0"] if end == "rollback" else [])


def test_a_message_that_is_held_for_long_does_not_make_consumers_read_all_later_messages(connect):
    connection, slow = connect(), connect(autocommit=False)
    make(connection)
    fill(connection, range(2000))
    consume(slow)
    for _ in range(1000):
        consume(connection)
    with connection.transaction():
        before = one(connection, READ)
        for _ in range(50):
            consume(connection)
        assert (one(connection, READ) - before) / 50 < 150


def test_late_messages_are_received_one_by_one_although_later_messages_were(connect):
    connection, late = connect(), connect(autocommit=False)
    make(connection, parts=16)
    for n in range(3):
        post(late, f"late{n}")
        fill(connection, [f"{n}.{i}" for i in range(30)])
    assert len(singly(connection)) == 90
    late.commit()
    assert singly(connection) == ["late0", "late1", "late2"]


def test_a_late_message_is_found_without_reading_received_messages(connect):
    connection = connect()
    make(connection)
    # A consumer that reads nothing keeps the log.
    consumer(connection, "slow")
    fill(connection, range(2000))
    assert len(consumen(connection, most=2000)) == 2000
    with ExitStack() as opened:
        for _ in range(20):
            fill(opened.enter_context(psycopg.connect(connection.info.dsn)), ["late"] * 3)
        fill(connection, range(50))
        assert len(singly(connection)) == 50
    connection.execute("analyze")
    with connection.transaction():
        before = one(connection, READ)
        assert singly(connection) == ["late"] * 60
        assert (one(connection, READ) - before) / 60 < 500


def test_transactions_that_have_ended_are_looked_for_no_more_beside_a_busy_part(connect):
    connection, slow, late = connect(), connect(autocommit=False), connect(autocommit=False)
    make(connection, parts=4)
    fill(connection, range(8))
    connection.execute("select setseed(0.5)")
    assert consume(slow) == "0"
    found = 1
    for _ in range(30):
        post(late, "late")
        fill(connection, range(40))
        found += len([consume(connection) for _ in range(20)])
        late.commit()
    assert one(connection, "select max(cardinality(late_xids)) from mbus.level") <= 3
    slow.commit()
    assert found + len(singly(connection)) == 8 + 30 * 41


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_that_has_ended_is_looked_for_no_more_though_nothing_else_comes(connect, end):
    connection, late = connect(), connect(autocommit=False)
    make(connection, parts=4)
    post(late, "late")
    fill(connection, range(40))
    assert len(singly(connection)) == 40
    look_in_vain(connection)
    assert one(connection, "select late_xids <> '{}' from mbus.level")
    getattr(late, end)()
    assert len(singly(connection)) == (1 if end == "commit" else 0)
    look_in_vain(connection)
    assert one(connection, "select late_xids = '{}' from mbus.level")


def test_messages_that_were_rolled_back_come_again_in_order(connect):
    connection, undone = connect(), connect(autocommit=False)
    make(connection, parts=16)
    fill(connection, range(100))
    assert len(singly(undone)) == 100
    undone.rollback()
    assert singly(connection) == [str(n) for n in range(100)]


def test_a_consumer_of_few_among_many_messages_lets_the_log_be_trimmed(connect):
    connection = connect()
    make(connection)
    consumer(connection, "few", "(t.data -> 'n')::integer % 1000 = 0")
    connection.execute("select setseed(0.5)")
    for n in range(3):
        fill(connection, range(1000 * n + 1, 1000 * n + 1001))
        drain(connection)
        assert singly(connection, "few") == [str(1000 * n + 1000)]
        for _ in range(30):
            consume(connection, "few")
    connection.execute("select mbus.maintain()")
    assert one(connection, 'select count(*) from mbus."log$q"') < 1000


OTHER_SEEDS = pytest.mark.release("other orders by the same code: each change runs two of them")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=OTHER_SEEDS) for seed in range(2, 6))])
def test_in_whatever_order_transactions_end_each_message_is_received_once(connect, seed):
    """Several connections post, claim single and many messages, roll back, and run maintenance, in random order."""
    chance = random.Random(seed)
    make(connect(), parts=chance.choice([1, 2, 5, 16]))
    selector = chance.choice([None, "t.data -> 'n' <> 'x'"])
    consumer(connect(), "other", selector)
    crowd = [connect(autocommit=False) for _ in range(5)]
    posted, received = [[] for _ in crowd], [[] for _ in crowd]
    sent, got = [], []
    for step in range(250):
        i = chance.randrange(len(crowd))
        match chance.choices(["post", "one", "many", "commit", "rollback"], [6, 6, 1, 4, 1])[0]:
            case "post":
                new = [f"{step}.{n}" for n in range(chance.randint(1, 3))]
                fill(crowd[i], new)
                posted[i] += new
            case "one" | "many" as how:
                name = chance.choice(["default", "other"])
                found = [consume(crowd[i], name)] if how == "one" else consumen(crowd[i], 5, name)
                received[i] += [(name, n) for n in found if n is not None]
            case "commit":
                crowd[i].commit()
                sent, got = sent + posted[i], got + received[i]
                posted[i], received[i] = [], []
            case "rollback":
                crowd[i].rollback()
                posted[i], received[i] = [], []
    for each, mine, theirs in zip(crowd, posted, received, strict=True):
        each.commit()
        sent, got = sent + mine, got + theirs
    for name in ("default", "other"):
        got += [(name, n) for n in singly(connect(), name)]
    assert sorted(got) == sorted((name, n) for name in ("default", "other") for n in sent)
    assert one(connect(), "select mbus.peek_q()") is False
