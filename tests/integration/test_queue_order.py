"""Order between messages, taking them by their id, putting them back, and the dmq."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.queues import consume, consumen, consumer, drain, fill, make, one, post, take, there


@pytest.fixture
def q(connect):
    connection = connect()
    make(connection)
    return connection


def test_a_message_waits_until_the_one_it_names_was_received_and_committed(q, connect):
    first = post(q, 1)
    post(q, 2, after=[first])
    holder = connect(autocommit=False)
    assert consume(holder) == "1"
    assert drain(q) == []
    holder.rollback()
    assert consume(holder) == "1"
    holder.commit()
    assert drain(q) == ["2"]


def test_the_own_transaction_sees_at_once_what_it_received(q, connect):
    first = post(q, 1)
    post(q, 2, after=[first])
    reader = connect(autocommit=False)
    assert consume(reader) == "1"
    assert consume(reader) == "2"
    reader.rollback()
    assert consumen(reader, 10) == ["1"]
    assert consumen(reader, 10) == ["2"]


def test_consumen_never_returns_a_message_with_one_that_it_waits_for(q):
    first = post(q, 1)
    second = post(q, 2, after=[first])
    post(q, 3, after=[first, second])
    post(q, 4)
    assert consumen(q, 10) == ["1", "4"]
    assert consumen(q, 10) == ["2"]
    assert consumen(q, 10) == ["3"]


def test_messages_wait_for_those_of_other_queues(q):
    make(q, "r", "s")
    a, b = post(q, "a"), post(q, "b", "r")
    post(q, "c", "s", after=[a, b])
    assert drain(q, queue="s") == []
    assert drain(q) == ["a"]
    assert drain(q, queue="s") == []
    assert drain(q, queue="r") == ["b"]
    assert drain(q, queue="s") == ["c"]


def test_a_message_waits_for_every_consumer_of_its_predecessor(q):
    make(q, "r")
    consumer(q, "other")
    consumer(q, "never", "false")
    post(q, 2, "r", after=[post(q, 1)])
    assert drain(q) == ["1"]
    assert drain(q, queue="r") == []
    assert drain(q, "other") == ["1"]
    assert drain(q, queue="r") == ["2"]


def test_an_unknown_iid_blocks_nothing(q):
    post(q, 1, after=["q.999999", "nowhere.7", "nonsense"])
    assert drain(q) == ["1"]


def test_a_single_iid_may_stand_without_braces(q):
    make(q, "r")
    first = post(q, 1)
    q.execute("select mbus.post_r('n=>2', headers => hstore('consume_after', %s))", [first])
    assert drain(q, queue="r") == []
    drain(q)
    assert drain(q, queue="r") == ["2"]


def test_a_predecessor_that_expired_or_is_delayed(q):
    make(q, "r")
    post(q, 1, "r", after=[post(q, "gone", expires="-1s")])
    post(q, 2, "r", after=[post(q, "delayed", delay="0.2s")])
    assert drain(q, queue="r") == ["1"]
    q.execute("select pg_sleep(0.21)")
    assert drain(q, queue="r") == []
    assert drain(q) == ["delayed"]
    assert drain(q, queue="r") == ["2"]


def test_a_chain_of_messages_comes_one_by_one(q):
    make(q, "r")
    last = post(q, 0)
    for n in range(1, 10):
        last = post(q, n, "r" if n % 2 else "q", after=[last])
    found = []
    while some := consumen(q, 10) + consumen(q, 10, queue="r"):
        found += some
    assert found == [str(n) for n in range(10)]


def test_a_message_both_delayed_and_behind_another(q):
    make(q, "r")
    first = post(q, 1)
    post(q, 2, "r", after=[first], delay="0.1s")
    assert drain(q, queue="r") == []
    q.execute("select pg_sleep(0.11)")
    assert drain(q, queue="r") == []
    assert drain(q) == ["1"]
    assert drain(q, queue="r") == ["2"]


def test_many_that_wait_for_one_come_when_it_was_received(q):
    make(q, "r")
    first = post(q, "first", "r")
    for n in range(50):
        post(q, n, after=[first])
    post(q, "free")
    assert drain(q) == ["free"]
    assert drain(q, queue="r") == ["first"]
    assert drain(q, most=7) == [str(n) for n in range(50)]


def test_take_removes_a_message_for_every_consumer(q):
    consumer(q, "other")
    iids = fill(q, [1, 2, 3])
    assert one(q, "select (mbus.take(%s)).headers -> 'destination'", iids[1]) == "q"
    assert drain(q) == ["1", "3"]
    assert drain(q, "other") == ["1", "3"]
    assert one(q, "select (mbus.take(%s)).iid is null", iids[1])
    assert one(q, "select (mbus.take('q.12345')).iid is null")
    assert there(q) == []


def test_who_waits_for_a_message_that_is_taken_comes_though_nobody_consumes_its_queue(q, connect):
    make(q, "plugs", "undo")
    plugs = [post(q, n, "plugs") for n in range(30)]
    for n, plug in enumerate(plugs):
        post(q, n, "undo", after=[plug])
    assert drain(q, queue="undo") == []
    assert take(q, plugs[17]) == "17"
    assert drain(q, queue="undo") == ["17"]
    taker = connect(autocommit=False)
    assert take(taker, plugs[3]) == "3"
    assert drain(q, queue="undo") == []
    taker.commit()
    assert consume(q, queue="undo") == "3"
    q.execute("select mbus.drop_queue('plugs')")
    assert len(drain(q, queue="undo")) == 28


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


@pytest.mark.parametrize("batch", [1, 10])
def test_take_waits_for_who_holds_the_message(q, connect, batch):
    iid = post(q, 1)
    holder, taker = connect(autocommit=False), connect()
    assert consumen(holder, batch) == ["1"]
    taken: list[str | None] = []
    thread = threading.Thread(target=lambda: taken.append(take(taker, iid)))
    thread.start()
    waits = "select exists (select from pg_locks where not granted and locktype = 'advisory' and pid = %s)"
    while not one(q, waits, taker.info.backend_pid):
        assert thread.is_alive()
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


def test_a_message_that_was_taken_is_put_back(q):
    consumer(q, "other")
    iid = post(q, 1)
    assert drain(q) == ["1"]
    with q.transaction():
        assert take(q, iid) == "1"
        post(q, 2, iid=iid)
    assert drain(q) == []
    assert drain(q, "other") == ["2"]


def test_who_waits_for_a_message_in_the_dmq_goes_on_waiting(q):
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
    q.execute("create table done (n integer)")
    fill(q, [1, "x", 3])
    assert one(q, "select mbus.run_on_q('insert into done select ($1.data -> ''n'')::integer')") == 2
    assert q.execute("select n from done order by n").fetchall() == [(1,), (3,)]
    row = q.execute(
        "select iid, data -> 'n', headers ? 'dmq.added', headers -> 'dmq.error' from mbus.dmq"
    ).fetchone()
    assert row[:3] == ("q.2", "x", True)
    assert "integer" in row[3]
    assert drain(q) == []


def test_a_claim_of_many_messages_holds_no_more_locks_than_parts(connect):
    connection = connect()
    make(connection, parts=8)
    fill(connection, range(20_000))
    reader = connect(autocommit=False)
    assert len(consumen(reader, 20_000)) == 20_000
    query = "select count(*) from pg_locks where locktype = 'advisory' and pid = %s"
    assert one(connection, query, reader.info.backend_pid) <= 8 + 1
    reader.rollback()
    for _ in range(300):
        assert consume(reader) is not None
    assert one(connection, query, reader.info.backend_pid) <= 64 + 3 * 8 + 1
    reader.rollback()
    assert len(drain(connection)) == 20_000


def test_what_commits_late_is_received_though_later_messages_were(q, connect):
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


def test_a_successor_far_behind_many_that_are_delayed_is_not_in_one_answer_with_its_predecessor(connect):
    connection = connect()
    make(connection)
    first = post(connection, 1)
    connection.execute(
        "select mbus.post('q', 'n=>0', delayed_until => '2100-01-01') from generate_series(1, 1200)"
    )
    post(connection, 2, after=[first])
    assert consumen(connection, 1000) == ["1"]
    assert consumen(connection, 1000) == ["2"]
