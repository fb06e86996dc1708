"""Receiving messages by their id, putting them back with the same id, and the dmq (dead message queue)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.queues import consume, consumen, consumer, drain, fill, make, one, post, take, there
from tests.waiting import until, waits

pytestmark = pytest.mark.hstore


def test_take_removes_a_message_for_every_consumer(q):
    consumer(q, "other")
    iids = fill(q, [1, 2, 3])
    assert one(q, "select (mbus.take(%s)).headers -> 'destination'", iids[1]) == "q"
    assert drain(q) == ["1", "3"]
    assert drain(q, "other") == ["1", "3"]
    assert one(q, "select (mbus.take(%s)).iid is null", iids[1])
    assert one(q, "select (mbus.take('q.12345')).iid is null")
    assert there(q) == []


def test_take_minds_neither_delay_nor_expiry_nor_order(q):
    delayed, expired = post(q, 1, delay="1h"), post(q, 2, expires="-1h")
    waiting = post(q, 3, after=[delayed])
    assert [take(q, iid) for iid in (delayed, expired, waiting)] == ["1", "2", "3"]
    assert there(q) == []


def test_a_take_that_is_rolled_back_restores_the_message_for_all(q, connect):
    consumer(q, "other")
    iid = post(q, 1)
    taker = connect(autocommit=False)
    assert take(taker, iid) == "1"
    assert consume(q) is None
    assert drain(q, "other") == []
    taker.rollback()
    q.execute("select pg_sleep(0.03)")
    assert drain(q) == ["1"]
    assert drain(q, "other") == ["1"]


def test_a_message_that_expires_after_a_rolled_back_take_is_not_received(q, connect):
    iid = post(q, 1, expires="1s")
    taker = connect(autocommit=False)
    assert take(taker, iid) == "1"
    assert consume(q) is None
    taker.rollback()
    q.execute(
        "select pg_sleep(extract(epoch from expires - localtimestamp) + 0.01) from mbus.peek(%s)", [iid]
    )
    assert consume(q) is None


def test_the_id_of_another_queue_whose_name_is_alike_names_no_message(connect):
    connection = connect()
    make(connection, "eu_1", "eu11")
    post(connection, 1, "eu_1")
    post(connection, 2, "eu11")
    assert not one(connection, "select mbus.peek_eu_1('eu11.1')")
    assert one(connection, "select iid from mbus.take_from_eu_1_by_default('eu11.1')") is None
    assert (consume(connection, queue="eu_1"), consume(connection, queue="eu11")) == ("1", "2")


@pytest.mark.parametrize("how", ["mbus.take", "mbus.take_from_q_by_default"])
@pytest.mark.parametrize("batch", [1, 10])
def test_take_waits_for_who_holds_the_message(q, connect, batch, how):
    iid = post(q, 1)
    holder, taker = connect(autocommit=False), connect()
    assert consumen(holder, batch) == ["1"]
    taken: list[str | None] = []
    query = f"select ({how}(%s)).data -> 'n'"
    thread = threading.Thread(target=lambda: taken.append(one(taker, query, iid)))
    thread.start()
    until(q, waits(taker, "advisory"))
    holder.rollback()
    thread.join()
    assert taken == ["1"]
    assert drain(q) == []


def test_take_does_not_wait_for_who_holds_another_message_of_the_part(connect):
    connection = connect()
    make(connection, parts=1)
    fill(connection, [1, 2])
    holder = connect(autocommit=False)
    assert consume(holder) == "1"
    connection.execute("set lock_timeout = '5s'")
    assert take(connection, "q.2") == "2"
    holder.rollback()
    assert drain(connection) == ["1"]


def test_a_message_that_is_being_taken_is_skipped_by_others(connect):
    connection = connect()
    make(connection, parts=1)
    fill(connection, [1, 2])
    taker = connect(autocommit=False)
    assert take(taker, "q.1") == "1"
    assert consume(connection) == "2"
    taker.rollback()
    connection.execute("select pg_sleep(0.03)")
    assert consume(connection) == "1"


def test_a_message_that_was_taken_while_somebody_met_it_does_not_come_again(q, connect):
    # A consumer with a selector moves its position beyond the message, and cannot find it again through a receipt.
    consumer(q, "all", "true")
    iid = post(q, 1)
    assert drain(q) == ["1"]
    first, second, reader, stopping = (connect(autocommit=False) for _ in range(4))
    assert one(first, "select (mbus.take_from_q_by_all(%s)).data -> 'n'", iid) == "1"
    with ThreadPoolExecutor() as pool, first, stopping:
        stopping.execute("lock table mbus.position in share mode")
        met = pool.submit(consume, reader, "all")
        until(q, waits(reader, "relation"))
        tried = pool.submit(take, second, iid)
        until(q, waits(second, "advisory"))
        first.commit()
        assert tried.result() is None
        stopping.commit()
        assert met.result() is None
    second.commit()
    reader.commit()
    q.execute("select pg_sleep(0.03)")
    assert drain(q, "all") == []


def test_a_message_that_had_to_wait_and_is_being_taken_holds_up_nobody(q, connect):
    first = post(q, 1)
    second = post(q, 2, after=[first])
    # A claim of up to 100 messages goes by parts. It moves messages that wait for others to the table mbus.apart.
    assert consumen(q, 100) == ["1"]
    post(q, 3)
    taker = connect(autocommit=False)
    assert take(taker, second) == "2"
    q.execute("set statement_timeout = '5s'")
    assert [consume(q), consume(q)] == ["3", None]
    taker.rollback()
    assert drain(q) == ["2"]


def test_a_message_that_waits_no_more_and_is_being_taken_holds_up_nobody(connect):
    connection = connect()
    make(connection, parts=1)
    first = post(connection, 1)
    post(connection, 2, after=[first])
    third = post(connection, 3, after=[first])
    # A claim of up to 100 messages goes by parts. It moves messages that wait for others to the table mbus.apart.
    assert [consumen(connection, 100), consume(connection)] == [["1"], "2"]
    assert one(connection, "select array_agg(due) = '{-infinity}' from mbus.apart")
    post(connection, 4)
    taker = connect(autocommit=False)
    assert take(taker, third) == "3"
    connection.execute("set lock_timeout = '5s'")
    assert [consume(connection), consume(connection)] == ["4", None]
    taker.rollback()
    assert drain(connection) == ["3"]


def test_take_from_receives_for_one_consumer(q):
    consumer(q, "other")
    iids = fill(q, [1, 2, 3])
    query = "select (mbus.take_from_q_by_default(%s)).data -> 'n'"
    assert one(q, query, iids[1]) == "2"
    assert one(q, query, iids[1]) is None
    assert drain(q) == ["1", "3"]
    assert drain(q, "other") == ["1", "2", "3"]


@pytest.mark.parametrize("others", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 10])
def test_a_message_is_put_back_under_its_iid_by_whom_it_was_received(q, others, batch):
    for n in range(others):
        consumer(q, f"other{n}")
    if others > 1:
        assert drain(q, "other0") == []
    iid = post(q, 1)
    if others > 1:
        assert drain(q, "other0") == ["1"]
    with q.transaction():
        assert consumen(q, batch) == ["1"]
        assert post(q, "again", iid=iid) == iid
    assert q.execute("select iid, data -> 'n' from mbus.consume('q')").fetchall() == [(iid, "again")]
    assert consume(q) is None
    for n in range(others):
        assert drain(q, f"other{n}") == ([] if others > 1 and n == 0 else ["1"])
    assert there(q) == []


def test_a_message_is_put_back_again_and_again_with_a_delay_and_a_counter(q):
    make(q, "r")
    iid = post(q, 0)
    post(q, "after", "r", after=[iid])
    for n in range(1, 6):
        with q.transaction():
            assert consume(q) == str(n - 1)
            post(q, n, iid=iid, delay="0.01s")
        q.execute("select pg_sleep(0.02)")
        assert drain(q, queue="r") == []
    assert drain(q) == ["5"]
    assert drain(q, queue="r") == ["after"]


@pytest.mark.parametrize("tries", ["x", "-1", "99999999999", ""])
def test_a_poster_cannot_keep_a_message_from_being_tried_again(q, tries):
    q.execute("select mbus.post_q('n=>1', properties => hstore('tries', %s))", [tries])
    assert one(q, "select mbus.try_again(iid, '0') from mbus.consume('q')") == 2
    assert consume(q) == "1"


def test_a_message_that_was_taken_is_put_back(q):
    consumer(q, "other")
    iid = post(q, 1)
    assert drain(q) == ["1"]
    with q.transaction():
        assert take(q, iid) == "1"
        post(q, 2, iid=iid)
    assert drain(q) == []
    assert drain(q, "other") == ["2"]


def test_a_message_behind_a_message_in_the_dmq_goes_on_waiting(q):
    make(q, "r")
    iid = post(q, 1)
    post(q, 2, "r", after=[iid])
    with q.transaction():
        assert consume(q) == "1"
        assert one(q, "select mbus.post_dmq('n=>1', iid => %s)", iid) == iid
    assert drain(q, queue="r") == []
    assert one(q, "select mbus.is_msg_exists(%s)", iid)
    with q.transaction():
        assert take(q, iid) == "1"
        post(q, 3, iid=iid)
    assert drain(q, queue="r") == []
    assert drain(q) == ["3"]
    assert drain(q, queue="r") == ["2"]


def test_run_on_counts_successes_and_sends_failures_to_the_dmq(q):
    q.execute("select mbus.create_run_function('q')")
    q.execute("create table public.done (n integer)")
    fill(q, [1, "x", 3])
    assert one(q, "select mbus.run_on_q('insert into public.done select ($1.data -> ''n'')::integer')") == 2
    assert q.execute("select n from done order by n").fetchall() == [(1,), (3,)]
    row = q.execute(
        "select iid, data -> 'n', headers ? 'dmq.added', headers -> 'dmq.error' from mbus.dmq"
    ).fetchone()
    assert row[:3] == ("q.2", "x", True)
    assert "integer" in row[3]
    assert drain(q) == []


def test_a_message_that_was_received_before_does_not_come_to_all_consumers_again(q):
    consumer(q, "other")
    iid = post(q, 1)
    assert drain(q) == drain(q, "other") == ["1"]
    with pytest.raises(psycopg.Error, match=f"there is no message {iid}"):
        q.execute("select mbus.try_again(%s)", [iid])
    assert there(q) == []


def test_a_message_is_put_back_once(q):
    iid = post(q, 1)
    with pytest.raises(psycopg.Error, match="still in queue q"), q.transaction():
        assert consume(q) == "1"
        post(q, 2, iid=iid)
        post(q, 3, iid=iid)
    assert drain(q) == ["1"]


def test_an_iid_that_nobody_was_given_is_refused(q):
    with pytest.raises(psycopg.Error, match="Wrong iid=q.5 for queue q"):
        post(q, 1, iid="q.5")
    iid = one(q, "select mbus.get_iid('q')")
    assert post(q, 2, iid=iid) == iid
    assert take(q, iid) == "2"


def test_a_repeatable_read_transaction_does_not_take_what_was_received_since_it_began(q, connect):
    iid = post(q, 1)
    late = connect(autocommit=False)
    late.execute("set transaction isolation level repeatable read")
    assert there(late) == ["1"]
    assert consume(q) == "1"
    with pytest.raises(psycopg.Error, match="read committed"):
        take(late, iid)


def test_functions_about_a_message_agree_with_the_view_of_all_messages(q, connect):
    consumer(q, "odd", "(t.data -> 'n')::integer % 2 = 1")
    consumer(q, "third")
    late = connect(autocommit=False)
    post(late, 101)
    iids = fill(q, range(10))
    post(q, 102, after=[iids[9]])
    post(q, 103, delay="1h")
    post(q, 104, expires="1h")
    assert len(consumen(q, 5)) == 5
    assert consumen(q, 2, "odd") == ["1", "3"]
    assert len(drain(q, "third")) == 11
    late.commit()
    take(q, iids[8])
    one(q, "select (mbus.take_from_q_by_default(%s)).id", iids[7])
    with q.transaction():
        take(q, iids[6])
        post(q, 6, iid=iids[6])
    compare = (
        "select (a.wanted, a.received, a.gone)::text, (e.wanted, e.received, e.gone)::text "
        'from mbus.queue as k, mbus."all$q" as a left join lateral mbus.entries(k, a.iid) as e on e.id = a.id'
    )
    rows = q.execute(compare).fetchall()
    assert len(rows) == 15
    assert len({row[0] for row in rows}) > 5
    assert [row[0] for row in rows] == [row[1] for row in rows]
