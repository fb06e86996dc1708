"""Many producers and consumers at once, some of whom roll back or are killed: no message is lost or doubled."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

from tests.queues import consumer, drain, fill, make, one, there

PRODUCERS, CONSUMERS, EACH = 20, 7, 30


def produce(conninfo: str, number: int, pairs: bool) -> None:
    random.seed(number)
    with psycopg.connect(conninfo) as connection:
        for n in range(EACH):
            name = f"{number}.{n}"
            if pairs:
                connection.execute(
                    "select mbus.post_r(hstore('n', %s), hstore('consume_after', mbus.post_q(hstore('n', %s))))",
                    [name, name],
                )
            elif n % 10 == 0:
                fill(connection, [f"{name}.{i}" for i in range(5)])
            else:
                connection.execute(
                    "select mbus.post_q(hstore('n', %s), properties => hstore('even', %s))",
                    [name, str(n % 2)],
                )
            if random.random() < 0.2:
                connection.rollback()
            else:
                connection.execute(
                    "insert into posted values (%s, %s)", [name, 5 if not pairs and n % 10 == 0 else 1]
                )
                connection.commit()


def receive(conninfo: str, number: int, queue: str, name: str, ended: threading.Event) -> None:
    random.seed(number)
    most = random.choice([1, 10, 50])
    connection = psycopg.connect(conninfo)
    while True:
        was_over = ended.is_set()
        rows = connection.execute(
            f"select data -> 'n' from mbus.consumen_{queue}_by_{name}(%s)", [most]
        ).fetchall()
        for row in rows:
            connection.execute(
                "insert into received (queue, consumer, n) values (%s, %s, %s)", [queue, name, row[0]]
            )
        chance = random.random()
        if chance < 0.1:
            connection.rollback()
        elif chance < 0.13:
            one(connection, "select 1")
            with psycopg.connect(conninfo, autocommit=True) as killer:
                killer.execute("select pg_terminate_backend(%s)", [connection.info.backend_pid])
            connection.close()
            connection = psycopg.connect(conninfo)
        else:
            connection.commit()
            if not rows and was_over and not one(connection, f"select mbus.peek_{queue}()"):
                connection.close()
                return


def run(conninfo: str, readers: list[tuple[str, str]], pairs: bool) -> None:
    ended = threading.Event()
    failures: list[Exception] = []

    def guarded(work: Callable[..., None], *arguments: object) -> threading.Thread:
        def body() -> None:
            try:
                work(*arguments)
            except Exception as error:  # noqa: BLE001
                failures.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    producers = [guarded(produce, conninfo, n, pairs) for n in range(PRODUCERS)]
    consumers = [guarded(receive, conninfo, n, *readers[n % len(readers)], ended) for n in range(CONSUMERS)]
    for thread in producers:
        thread.join()
    ended.set()
    for thread in consumers:
        thread.join()
    assert failures == []


@pytest.fixture
def connection(connect):
    connection = connect()
    make(connection, "q", "r", parts=8)
    connection.execute("create table posted (n text, times integer)")
    connection.execute("create table received (id bigserial, queue text, consumer text, n text)")
    return connection


def test_every_message_is_received_once(connection, db):
    run(db, [("q", "default")], pairs=False)
    total = one(connection, "select sum(times) from posted")
    assert connection.execute("select count(*), count(distinct n) from received").fetchone() == (total, total)
    assert there(connection) == []


def test_two_selectors_that_complete_each_other_and_default_receive_twice_as_many(connection, db):
    consumer(connection, "even", "coalesce(t.properties -> 'even', '1') = '1'")
    consumer(connection, "odd", "t.properties -> 'even' = '0'")
    run(db, [("q", "default"), ("q", "even"), ("q", "odd")], pairs=False)
    total = one(connection, "select sum(times) from posted")
    rows = connection.execute(
        "select consumer = 'default', count(*), count(distinct n) from received group by 1"
    ).fetchall()
    assert sorted(rows) == [(False, total, total), (True, total, total)]
    assert there(connection) == []


def test_the_second_of_a_pair_never_comes_first(connection, db):
    run(db, [("q", "default"), ("r", "default")], pairs=True)
    total = one(connection, "select sum(times) from posted")
    counts = Counter(row[0] for row in connection.execute("select queue from received"))
    assert counts == {"q": total, "r": total}
    query = (
        "select count(*) from received as a join received as b using (n) "
        "where a.queue = 'q' and b.queue = 'r' and a.id > b.id"
    )
    assert one(connection, query) == 0


def test_what_was_received_is_deleted_as_it_goes(connection):
    for _ in range(20):
        fill(connection, range(1000))
        assert len(drain(connection)) == 1000
    connection.execute("select mbus.maintain()")
    assert one(connection, 'select count(*) from mbus."log$q"') == 0
    assert one(connection, "select count(*) from mbus.position where consumer > 0") <= 20


def test_what_many_consumers_received_is_deleted_as_it_goes(connection):
    consumer(connection, "a")
    consumer(connection, "b")
    connection.execute("select setseed(0)")
    for _ in range(30):
        fill(connection, range(1000))
        for name in ("default", "a", "b"):
            assert len(drain(connection, name)) == 1000
    assert one(connection, 'select count(*) from mbus."log$q"') < 10_000
