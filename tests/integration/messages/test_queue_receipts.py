"""Single messages are received by receipts, which a fold replaces by one position: none is lost, and none comes twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_pgchange.feeds import QueueFeed
from tests.batches import taken
from tests.limits import shorten
from tests.queues import consume, consumen, consumer, drain, fill, make, one, post, take, there
from tests.waiting import locks, until, waits

pytestmark = pytest.mark.hstore

RAISE = (
    "select mbus.raise_level(1, s, h, mbus.bound_now(), mbus.find$1(s, h, '{}', 1), '{}', false) "
    "from mbus.starts_at(1) as s, coalesce(pg_sequence_last_value('mbus.\"seq$q\"'), 0) as h"
)
FOLD = (
    "select mbus.fold(1, l.done, l.late_xids, coalesce(%s, pg_current_snapshot())) "
    "from mbus.level as l where l.consumer = 1 order by l.done desc limit 1"
)
RECEIPTS = "select coalesce(array_agg(id order by id), '{}') from mbus.receipt where consumer = 1"
POSITIONS = "select array_agg(array[part, done] order by part) from mbus.position where consumer = 1"


def fold(connection, seen=None):
    """Do the work that a consumer does once in several hundred messages: raise the level, and fold receipts into
    positions."""
    connection.execute(RAISE)
    connection.execute(FOLD, [seen])


def test_receipts_become_one_position(q):
    fill(q, range(10))
    assert [consume(q) for _ in range(7)] == [str(n) for n in range(7)]
    assert one(q, RECEIPTS) == [1, 2, 3, 4, 5, 6, 7]
    fold(q)
    assert one(q, RECEIPTS) == []
    assert one(q, POSITIONS) == [[-1, 7]]
    assert drain(q, most=1) == ["7", "8", "9"]


def test_receipts_do_not_pile_up(q):
    fill(q, range(100))
    fold(q)
    # Pretend that 2,000 messages were received since the last fold.
    q.execute("update mbus.position set done = done - 2000")
    q.execute("select setseed(0.5)")
    for n in range(100):
        assert consume(q) == str(n)
    assert len(one(q, RECEIPTS)) < 100


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_fold_leaves_a_message_to_its_holder(q, connect, end):
    holder = connect(autocommit=False)
    fill(q, range(8))
    assert [consume(q), consume(q), consume(holder)] == ["0", "1", "2"]
    assert drain(q, most=1) == ["3", "4", "5", "6", "7"]
    fold(q)
    assert one(q, RECEIPTS) == [4, 5, 6, 7, 8]
    getattr(holder, end)()
    assert consume(q) == ("2" if end == "rollback" else None)
    assert consume(q) is None
    fold(q)
    assert there(q) == drain(q) == []


def test_a_transaction_that_has_folded_puts_back_only_its_own_messages(q, connect):
    fill(q, range(4))
    assert consume(q) == "0"
    with pytest.raises(psycopg.Error, match="there is no message q.1"), q.transaction():
        assert consume(q) == "1"
        fold(q)
        q.execute("select mbus.try_again('q.1')")
    with q.transaction():
        assert consume(q) == "1"
        # From now on a snapshot knows a higher id than that of this transaction.
        connect().execute("select pg_current_xact_id()")
        fold(q)
        assert one(q, "select mbus.try_again('q.2', '0')") == 2
    assert drain(q) == ["2", "3", "1"]


def test_messages_of_a_rolled_back_savepoint_after_a_fold_come_again(q, connect):
    session = connect(autocommit=False)
    fill(q, range(4))
    assert consume(session) == "0"
    session.execute("savepoint s")
    assert consume(session) == "1"
    fold(session)
    session.execute("rollback to s")
    assert consume(session) == "1"
    fold(session)
    session.execute("rollback to s")
    session.commit()
    assert drain(q) == ["1", "2", "3"]


def test_a_late_message_below_a_fold_comes_once(q, connect):
    """The message comes once even if it is received after the fold has read the log, and before it deletes receipts."""
    late = connect(autocommit=False)
    post(late, "late")
    fill(q, range(8))
    assert drain(q, most=1) == [str(n) for n in range(8)]
    q.execute(RAISE)
    seen = one(q, "select pg_current_snapshot()::text")
    late.commit()
    assert consume(q) == "late"
    q.execute(FOLD, [seen])
    assert one(q, POSITIONS) == [[-1, 9]]
    assert one(q, RECEIPTS) == [1]
    assert consume(q) is None
    assert there(q) == drain(q) == []


def test_a_late_message_comes_after_a_fold(q, connect):
    late = connect(autocommit=False)
    post(late, "late")
    fill(q, range(8))
    assert drain(q, most=1) == [str(n) for n in range(8)]
    fold(q)
    late.commit()
    assert there(q) == ["late"]
    assert [consume(q), consume(q)] == ["late", None]


def test_a_message_that_was_passed_over_while_it_was_held_is_not_received_again_after_a_fold(connect):
    connection, holder = connect(), connect(autocommit=False)
    make(connection, parts=2)
    fill(connection, range(4))
    assert consume(holder) == "0"
    # The fold has taken place, as after 256 messages: message 1 now waits apart for its holder.
    assert one(connection, "select mbus.single$1()") == 3
    assert one(connection, "select array_agg(id) from mbus.apart") == [1]
    holder.commit()
    connection.execute("update mbus.apart set due = 'infinity'")
    assert consume(connection) == "1"
    fold(connection)
    assert one(connection, POSITIONS) == [[-1, 3]]
    connection.execute("update mbus.apart set due = clock_timestamp()")
    assert [consume(connection), consume(connection)] == ["3", None]
    assert one(connection, "select count(*) from mbus.apart") == 0
    assert there(connection) == []


def test_a_fold_does_not_wait_and_keeps_no_lock_where_others_are_at_work(q, connect):
    fill(q, range(8))
    holder, folding = connect(autocommit=False), connect(autocommit=False)
    folding.execute("set lock_timeout = '5s'")
    assert [consume(q), consume(q)] == ["0", "1"]
    # It moves the position of the last part.
    assert one(holder, "select mbus.single$1()") == 3
    before = one(q, POSITIONS)
    fold(folding)
    assert [lock.kind for lock in locks(q, folding)].count("advisory") == 0
    folding.commit()
    assert one(q, POSITIONS) == before


@pytest.mark.parametrize("stands", ["together", "apart"])
def test_a_message_that_another_receives_while_it_is_found_comes_once(connect, stands):
    q, finding, pausing = connect(), connect(), connect()
    make(q)
    fill(q, range(3))
    if stands == "together":
        fold(q)
        assert one(q, POSITIONS) == [[-1, 0]]
    limit = "limit amt - cardinality(ids)"
    shorten(q, "mbus.consume_q_by_default", limit, f"{limit} + length(pg_advisory_xact_lock(1)::text)")
    pausing.execute("select pg_advisory_lock(1)")
    with ThreadPoolExecutor() as threads:
        received = threads.submit(consume, finding)
        until(q, waits(finding, behind=pausing))
        assert one(q, "select data -> 'n' from mbus.receive$1()") == "0"
        pausing.execute("select pg_advisory_unlock(1)")
        assert received.result() == "1"
    assert drain(q) == ["2"]


def test_each_consumer_has_its_own_receipts(q):
    consumer(q, "other")
    fill(q, range(6))
    assert [consume(q), consume(q, "other"), consume(q, "other")] == ["0", "0", "1"]
    fold(q)
    assert one(q, "select count(*) from mbus.receipt") == 2
    consumer(q, "third")
    assert drain(q, "other", most=1) == ["2", "3", "4", "5"]
    assert drain(q, most=1) == ["1", "2", "3", "4", "5"]
    assert drain(q, "third") == ["1", "2", "3", "4", "5"]
    assert there(q) == []


def test_messages_that_are_delayed_or_expired_or_taken_keep_the_others_from_nothing(q):
    post(q, "late", delay="1h")
    post(q, "gone", expires="-1s")
    taken_iid = post(q, "taken")
    fill(q, range(3))
    assert take(q, taken_iid) == "taken"
    # The first call moves the delayed message out of the log. Once the level is behind that message, it hinders no
    # receipts.
    found = {consume(q)}
    q.execute(RAISE)
    found |= {consume(q), consume(q)}
    assert found == {"0", "1", "2"}
    assert one(q, RECEIPTS) == [4, 6]
    fold(q)
    q.execute("update mbus.apart set due = clock_timestamp()")
    assert [consume(q), consume(q)] == ["late", None]


def test_a_message_that_waits_for_one_received_by_a_receipt_comes(q):
    make(q, "r")
    first = post(q, 1)
    post(q, 2, "r", after=[first])
    assert consume(q, queue="r") is None
    assert consume(q) == "1"
    assert one(q, RECEIPTS) == [1]
    # Other waiting messages would only be found by an occasional search.
    assert one(q, "select count(*) from mbus.wake") == 1
    assert consume(q, queue="r") == "2"


@pytest.mark.usefixtures("few_sessions")
def test_a_feed_that_claims_one_and_single_messages_share_a_queue(q, db):
    fill(q, range(6))
    found = [consume(q)]

    def meanwhile(results):
        found.append(consume(q))
        fold(q)

    batches = [
        [change.data["data"]["n"] for change in taken(QueueFeed("q"), db, db, 1, meanwhile)] for _ in range(2)
    ]
    assert batches == [["1"], ["3"]]
    assert found == ["0", "2", "4"]
    assert drain(q) == ["5"]
    assert there(q) == []


def test_a_small_batch_comes_while_others_hold_messages_of_each_part(q, connect):
    holder, batch = connect(autocommit=False), connect(autocommit=False)
    fill(q, range(40))
    assert consumen(holder, 5) == ["0", "1", "2", "3", "4"]
    assert consumen(batch, 10) == [str(n) for n in range(5, 15)]
    assert consumen(q, 64) == [str(n) for n in range(15, 40)]
    holder.rollback()
    batch.execute("savepoint s")
    assert consumen(batch, 3) == ["0", "1", "2"]
    batch.execute("rollback to s")
    batch.commit()
    fold(q)
    assert consumen(q, 64) == ["0", "1", "2", "3", "4"]
    assert there(q) == drain(q) == []


def test_a_small_batch_has_neither_what_is_delayed_nor_expired_nor_taken_and_puts_back(q):
    fill(q, range(3))
    late = post(q, "late", delay="1h")
    post(q, "gone", expires="-1s")
    taken_iid = post(q, "taken")
    fill(q, range(3, 6))
    assert take(q, taken_iid) == "taken"
    with q.transaction():
        assert consumen(q, 64) == [str(n) for n in range(6)]
        assert one(q, "select mbus.try_again('q.2', '0')") == 2
    assert consumen(q, 64) == ["1"]
    assert there(q) == ["late", "gone"]
    assert take(q, late) == "late"


def test_a_small_batch_has_what_commits_late_and_what_stands_apart(q, connect):
    late, holder = connect(autocommit=False), connect(autocommit=False)
    fill(late, ["a", "b"])
    fill(q, range(30))
    assert consume(holder) == "0"
    # More than 64 are received by whole parts, without that of the message that is held.
    assert len(consumen(q, 100)) == 22
    late.commit()
    holder.rollback()
    fill(q, [30])
    assert consumen(q, 3) == ["a", "b", "0"]
    assert consumen(q, 64) == ["4", "8", "12", "16", "20", "24", "28", "30"]
    assert there(q) == drain(q) == []


def test_a_small_batch_does_not_have_what_waits_for_another_before_that(q):
    first = post(q, 1)
    post(q, 2, after=[first])
    post(q, 3)
    assert [consumen(q, 64) for _ in range(3)] == [["1", "3"], ["2"], []]


def test_small_batches_hold_no_more_locks_than_single_messages(q, connect):
    reader = connect(autocommit=False)
    fill(q, range(1000))
    found = [n for _ in range(40) for n in consumen(reader, 10)]
    assert sorted(map(int, found)) == list(range(400))
    assert [lock.kind for lock in locks(q, reader)].count("advisory") <= 64 + 3 * 4 + 1
    reader.rollback()
    assert drain(q, most=50) == [str(n) for n in range(1000)]


def test_a_batch_by_parts_gets_on_though_others_hold_messages_of_each_part(q, connect):
    holder = connect(autocommit=False)
    fill(q, range(20))
    assert len([consume(holder) for _ in range(4)]) == 4
    assert consumen(q, 100) == ["4"]


def test_a_small_batch_leaves_the_rest_to_others_after_many_were_received_behind_one_that_was_held(
    q, connect
):
    fill(q, range(500))
    holder = connect(autocommit=False)
    assert consume(holder) == "0"
    assert sum(len(consumen(q, 51)) for _ in range(5)) == 255
    holder.commit()
    assert consumen(holder, 64) == [str(n) for n in range(256, 320)]
    assert consumen(q, 64) == [str(n) for n in range(320, 384)]


def test_five_batches_of_64_do_not_wait_for_one_another(q, connect):
    fill(q, range(400))
    holders = [connect(autocommit=False) for _ in range(5)]
    assert [n for holder in holders for n in consumen(holder, 64)] == [str(n) for n in range(320)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_small_batches_go_on_beside_one_another_after_a_large_one_has_ended(q, connect, end):
    fill(q, range(1300))
    large, other = connect(autocommit=False), connect(autocommit=False)
    assert len(consumen(large, 100)) == 100
    q.execute("select setseed(0.5)")
    # More messages than a small batch reads wait behind the large batch, so a level names the busy parts.
    assert [consumen(q, 64) for _ in range(12)] == [[]] * 12
    assert one(q, "select exists (select from mbus.level where busy <> '{}')")
    getattr(large, end)()
    found = [*consumen(q, 64), *consumen(other, 64), *consumen(q, 64)]
    first = 100 if end == "commit" else 0
    assert found == [str(n) for n in range(first, first + 192)]


def test_a_level_that_was_raised_beside_a_fold_brings_back_nothing_that_was_folded(q, connect):
    fill(q, range(40))
    assert [consume(q) for _ in range(22)] == [str(n) for n in range(22)]
    other = connect(autocommit=False)
    # Raise the level as a claim does that holds the part of the next message and has written nothing. It does not see the
    # fold.
    other.execute(RAISE.replace("'{}'", "'{3}'"))
    fold(q)
    other.commit()
    assert one(q, POSITIONS) == [[-1, 22]]
    assert one(q, "select l.froms from mbus.level as l order by l.done desc limit 1") == [0]
    assert consumen(q, 4) + drain(q, most=1) == [str(n) for n in range(22, 40)]


def test_a_level_that_was_raised_beside_a_fold_loses_no_late_message(q, connect):
    late, other = connect(autocommit=False), connect(autocommit=False)
    fill(q, range(2))
    fill(late, ["late"])
    fill(q, range(2, 39))
    assert [consume(q) for _ in range(21)] == [str(n) for n in range(21)]
    q.execute(RAISE)
    seen = one(q, "select pg_current_snapshot()")
    late.commit()
    # This level sees the late transaction, and passes its message as the part is busy. The fold has not seen it.
    other.execute(RAISE.replace("'{}'", "'{3}'"))
    q.execute(FOLD, [seen])
    other.commit()
    assert one(q, POSITIONS) == [[-1, 22]]
    assert sorted(consumen(q, 4) + drain(q, most=1)) == sorted(["late", *(str(n) for n in range(21, 39))])


def test_a_level_below_a_part_that_was_busy_keeps_the_messages_of_the_others(q, connect):
    fill(q, range(40))
    assert consume(q) == "0"
    others = connect(autocommit=False)
    others.execute("select pg_advisory_xact_lock(mbus.part_key(1, p)) from generate_series(1, 3) as p")
    of_one_part = consumen(q, 100)
    assert one(q, POSITIONS) == [[-1, 0], [0, 40]]
    others.rollback()
    q.execute(RAISE.replace("'{}'", "'{0}'"))
    assert one(q, "select array[l.done, l.busy[1], l.froms[1]] from mbus.level as l") == [1, 0, 40]
    assert len(of_one_part) == 10
    assert sorted(map(int, of_one_part + drain(q, most=1))) == list(range(1, 40))
