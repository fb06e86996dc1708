"""The order of messages that wait for others, of their own queue and of other queues."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from tests.queues import BOUNDS, consume, consumen, consumer, drain, make, one, post, take

pytestmark = pytest.mark.hstore


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


def test_a_user_moves_to_other_servers_in_the_right_order(connect):
    connection = connect()
    servers = ("one", "two", "three")
    make(connection, *servers, "here")
    created = [post(connection, "create", server) for server in servers]
    for server, iid in zip(servers, created, strict=True):
        post(connection, "limit", server, after=[iid])
    placed = post(connection, "place", "here", after=created)
    post(connection, "delete", "here", after=[placed])
    for server in servers:
        assert drain(connection, queue="here") == []
        assert consume(connection, queue=server) == "create"
    assert consume(connection, queue="here") == "place"
    assert [drain(connection, queue=server) for server in servers] == [["limit"]] * 3
    assert drain(connection, queue="here") == ["delete"]


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


def test_several_iids_may_stand_without_braces(q):
    make(q, "r")
    first, second = post(q, 1), post(q, 2)
    q.execute("select mbus.post_r('n=>3', headers => hstore('consume_after', %s))", [f"{first}, {second}"])
    assert (consume(q), drain(q, queue="r")) == ("1", [])
    assert (consume(q), drain(q, queue="r")) == ("2", ["3"])


def test_a_predecessor_that_expired_or_is_delayed(q):
    make(q, "r")
    post(q, 1, "r", after=[post(q, "gone", expires="-1s")])
    post(q, 2, "r", after=[post(q, "delayed", delay="0.2s")])
    assert drain(q, queue="r") == ["1"]
    q.execute("select pg_sleep(0.21)")
    assert drain(q, queue="r") == []
    assert drain(q) == ["delayed"]
    assert drain(q, queue="r") == ["2"]


@pytest.mark.parametrize("was_seen", [False, True])
def test_a_waiting_message_comes_when_its_predecessor_expires_unconsumed(q, was_seen):
    make(q, "r")
    consumer(q, "other")
    first = post(q, 1, expires="0.3s", delay="1h" if was_seen else None)
    if was_seen:
        assert drain(q) == drain(q, "other") == []
    post(q, 2, "r", after=[first])
    early = drain(q, queue="r")
    assert early == [] or one(q, "select expires <= localtimestamp from mbus.peek(%s)", first)
    q.execute("select pg_sleep(0.31)")
    assert early + drain(q, queue="r") == ["2"]


def test_a_new_consumer_has_a_message_behind_another_not_before_its_time(q):
    post(q, 2, after=[post(q, 1)], delay="1h")
    assert drain(q) == ["1"]
    consumer(q, "new")
    assert drain(q, "new") == []


def test_a_message_on_which_a_selector_failed_does_not_come_before_its_time(q):
    q.execute(BOUNDS + "insert into bounds values (0)")
    consumer(q, "number", "1 / public.bound(t.data->'n') = 1")
    post(q, 1, delay="1h")
    assert drain(q, "number") == []
    q.execute("update bounds set b = 1")
    assert one(q, "select mbus.retry_faults('q', 'number')") == 1
    assert drain(q, "number") == []


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


def test_a_waiting_message_comes_when_its_predecessor_is_taken_from_an_idle_queue(q, connect):
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


@pytest.mark.parametrize("always_something_else", [False, True])
def test_a_waiting_message_comes_although_the_taker_of_its_predecessor_did_not_see_it(
    q, connect, always_something_else
):
    make(q, "r")
    first = post(q, 1)
    post(q, 2, "r", after=[first])
    waiter = connect(autocommit=False)
    assert consumen(waiter, 10, queue="r") == []
    assert take(q, first) == "1"
    waiter.commit()
    assert one(q, "select count(*) from mbus.wake") == 0
    found: list[str] = []
    for n in range(500):
        if always_something_else:
            post(q, f"else {n}", "r")
        found += consumen(q, 10, queue="r")
        if "2" in found:
            break
    assert "2" in found


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


def test_a_successor_in_the_log_is_not_in_one_answer_with_a_predecessor_whose_time_has_come(q):
    first = post(q, 1, delay="1h")
    assert consumen(q, 10) == []
    post(q, 2, after=[first])
    q.execute("update mbus.apart set due = clock_timestamp()")
    assert consumen(q, 10) == ["1"]
    assert consumen(q, 10) == ["2"]


def test_a_successor_in_the_log_is_not_in_one_answer_with_a_predecessor_that_waited_itself(q):
    make(q, "r")
    first = post(q, 1, after=[post(q, 0, "r")])
    assert consumen(q, 10) == []
    post(q, 2, after=[first])
    assert drain(q, queue="r") == ["0"]
    assert consumen(q, 10) == ["1"]
    assert consumen(q, 10) == ["2"]


def test_a_message_waits_for_a_batch_that_has_its_predecessor_though_that_expires(q, db):
    make(q, "r")
    first = post(q, 1, expires="1h")
    post(q, 2, "r", after=[first])
    with ConsumerTransaction(QueueFeed("q"), db) as worker:
        assert worker.claim(10) is not None
        q.execute("update mbus.\"log$q\" set expires = now() - interval '1 hour'")
        assert drain(q, queue="r") == []
        worker.ack()
    assert drain(q, queue="r") == ["2"]


def test_a_malformed_header_is_refused_to_who_copies_and_stops_nobody(q):
    with (
        pytest.raises(psycopg.Error, match="malformed array"),
        q.cursor().copy('copy mbus."log$q" (data, headers) from stdin') as out,
    ):
        out.write_row(["n=>1", "consume_after=>q.7"])
    post(q, 2)
    assert drain(q) == ["2"]


def test_what_freed_messages_wait_for_is_looked_for_once_each(connect):
    connection = connect()
    make(connection, "q", "r")
    for n in range(100):
        connection.execute(
            "select mbus.post_r(hstore('n', %(n)s), hstore('consume_after', mbus.post_q(hstore('n', %(n)s))))",
            {"n": str(n)},
        )
    assert consumen(connection, 100, queue="r") == []
    assert len(consumen(connection, 100)) == 100
    connection.execute("set track_functions = 'all'")
    assert len(consumen(connection, 100, queue="r")) == 100
    connection.execute("select pg_stat_force_next_flush()")
    calls = one(
        connection,
        "select calls from pg_stat_user_functions where schemaname = 'mbus' and funcname = 'obstacle'",
    )
    assert 100 <= calls <= 200


def test_one_selector_is_asked_of_those_that_are_still_to_receive_a_predecessor(connect):
    connection = connect()
    make(connection)
    for name in ("a", "b", "c", "d"):
        consumer(connection, name, selector="true")
    post(connection, 2, after=[post(connection, 1)])
    assert consumen(connection, 10) == ["1"]
    connection.execute("set track_functions = 'all'")
    assert consume(connection) is None
    connection.execute("select pg_stat_force_next_flush()")
    calls = one(
        connection,
        "select coalesce(sum(calls), 0) from pg_stat_user_functions "
        "where schemaname = 'mbus' and funcname like 'match$%%'",
    )
    assert calls == 1
