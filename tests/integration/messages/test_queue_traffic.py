"""Many concurrent producers and consumers, which roll back or are killed. No message is lost, duplicated or too early."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psycopg
import pytest

from tests.queues import consumer, drain, fill, make, one, there

pytestmark = pytest.mark.hstore

EACH = 12
"""The number of messages of each producer, or of times at which it posts several messages at once."""
FEW = (8, 6)
"""Numbers of producers and of consumers.

Each of them is killed once and rolls back once, so each moment is met many times.
"""
ONE_BY_ONE = pytest.mark.release("the crowd of the mixed test, all in one way")
SIZES = [(1, 10, 100), pytest.param((1,), marks=ONE_BY_ONE), pytest.param((10, 64), marks=ONE_BY_ONE)]
"""The numbers of messages that consumers receive at once: a single message, a small batch by receipts, or a large
batch by whole parts."""
SOON = 10
"""Seconds from the last post until everything is received. On an idle machine it takes less than one second."""
CROWDS = [FEW, pytest.param((20, 7), marks=pytest.mark.release("many more sessions that do the same"))]
TIED = "select mbus.post_r(hstore('n', %s), hstore('consume_after', mbus.post_q(hstore('n', %s))))"
UNTIED = "select mbus.post_r(hstore('n', %s)), mbus.post_q(hstore('n', %s))"

Reader = tuple[str, str, int]
"""A queue, one of its consumers, and the number of messages that are received at once."""


@dataclass
class Session:
    """A session that runs transactions.

    Its first transaction with messages is killed before the commit. The second is rolled back, and so are some
    later transactions.
    """

    conninfo: str
    seed: int
    faults: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.connection = psycopg.connect(self.conninfo)

    def end(self) -> None:
        luck = self.chance.random()
        if not self.faults["killed"] or luck < 0.03:
            self.faults["killed"] += 1
            with psycopg.connect(self.conninfo, autocommit=True) as killer:
                killer.execute("select pg_terminate_backend(%s, 5000)", [self.connection.info.backend_pid])
            self.connection.close()
            self.connection = psycopg.connect(self.conninfo)
        elif not self.faults["rolled back"] or luck < 0.13:
            self.faults["rolled back"] += 1
            self.connection.rollback()
        else:
            self.connection.commit()


def produce(session: Session, pairs: bool) -> None:
    for n in range(EACH):
        name = f"{session.seed}.{n}"
        names = [name]
        if pairs:
            session.connection.execute(TIED, [name, name])
        elif n % 10 == 0:
            names = [f"{name}.{i}" for i in range(5)]
            fill(session.connection, names)
        else:
            session.connection.execute(
                "select mbus.post_q(hstore('n', %s), properties => hstore('even', %s))", [name, str(n % 2)]
            )
        session.connection.execute("insert into posted select unnest(%s::text[])", [names])
        session.end()


def receive(session: Session, reader: Reader, ended: threading.Event, apart: str | None = None) -> None:
    """After the last post, receive until nothing is left. With ``apart``, a connection string, the received messages are
    recorded in another transaction: a planted fault."""
    queue, name, most = reader
    while True:
        was_over = ended.is_set()
        rows = session.connection.execute(
            f"select data -> 'n' from mbus.consumen_{queue}_by_{name}(%s)", [most]
        ).fetchall()
        if rows:
            note(session.connection, apart, f"{queue}/{name}", [row[0] for row in rows])
            session.end()
            continue
        session.connection.commit()
        if was_over and not one(session.connection, f"select mbus.peek_{queue}()"):
            return


def note(connection: psycopg.Connection, apart: str | None, name: str, numbers: Sequence[str]) -> None:
    statement = "insert into received (consumer, n) select %s, unnest(%s::text[])"
    if apart is None:
        connection.execute(statement, [name, numbers])
    else:
        with psycopg.connect(apart) as other:
            other.execute(statement, [name, numbers])


def run(
    conninfo: str,
    readers: Sequence[Reader],
    crowd: tuple[int, int] = FEW,
    *,
    pairs: bool = False,
    apart: str | None = None,
) -> float:
    """Return how many seconds after the last post everything was received."""
    ended = threading.Event()
    producers = [Session(conninfo, n) for n in range(crowd[0])]
    consumers = [Session(conninfo, crowd[0] + n) for n in range(crowd[1])]
    with ThreadPoolExecutor(sum(crowd)) as pool:
        posting = [pool.submit(produce, session, pairs) for session in producers]
        receiving = [
            pool.submit(receive, session, readers[n % len(readers)], ended, apart)
            for n, session in enumerate(consumers)
        ]
        try:
            for task in posting:
                task.result()
        finally:
            ended.set()
        began = time.monotonic()
        for task in receiving:
            task.result()
        took = time.monotonic() - began
    for sessions in (producers, consumers):
        assert sum((session.faults for session in sessions), Counter()).keys() == {"killed", "rolled back"}
        for session in sessions:
            session.connection.close()
    return took


def wrong(connection: psycopg.Connection, *consumers: str) -> dict[str, int]:
    """Return the messages that these consumers together did not receive exactly once, and how often each was received."""
    rows = connection.execute(
        "select n, count(r.n) from posted as p "
        "full join (select n from received where consumer = any (%s)) as r using (n) "
        "group by n having count(r.n) <> 1 or count(p.n) <> 1",
        [list(consumers)],
    )
    return dict(rows.fetchall())


def misplaced(connection: psycopg.Connection) -> set[str]:
    """Return the pairs of messages whose second message was received first."""
    rows = connection.execute(
        "select n from received as a join received as b using (n) "
        "where a.consumer = 'q/default' and b.consumer = 'r/default' and a.id > b.id"
    )
    return {row[0] for row in rows}


@pytest.fixture
def connection(connect):
    connection = connect()
    make(connection, "q", "r", parts=8)
    connection.execute("create table posted (n text primary key)")
    connection.execute("create table received (id bigserial, consumer text, n text)")
    return connection


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("crowd", CROWDS)
def test_every_message_is_received_once_and_soon(connection, db, crowd, sizes):
    assert run(db, [("q", "default", most) for most in sizes], crowd) < SOON
    assert one(connection, "select count(*) from posted") > crowd[0]
    assert wrong(connection, "q/default") == {}
    assert there(connection) == []


@pytest.mark.parametrize("crowd", CROWDS)
def test_two_selectors_that_complete_each_other_and_default_receive_twice_as_many(connection, db, crowd):
    consumer(connection, "even", "coalesce(t.properties -> 'even', '1') = '1'")
    consumer(connection, "odd", "t.properties -> 'even' = '0'")
    run(db, [("q", "default", 10), ("q", "even", 1), ("q", "odd", 50)], crowd)
    assert wrong(connection, "q/default") == {}
    assert wrong(connection, "q/even", "q/odd") == {}
    assert len({row[0] for row in connection.execute("select consumer from received")}) == 3
    assert there(connection) == []


@pytest.mark.parametrize("crowd", CROWDS)
def test_the_second_of_a_pair_never_comes_first(connection, db, crowd):
    # First messages are received slowly and second messages quickly, so that an error in the order would show.
    run(db, [("r", "default", 50), ("r", "default", 10), ("q", "default", 1)], crowd, pairs=True)
    assert wrong(connection, "q/default") == {}
    assert wrong(connection, "r/default") == {}
    assert misplaced(connection) == set()


def test_readers_whose_notes_outlive_their_roll_backs_are_caught(connection, db):
    run(db, [("q", "default", 10)], apart=db)
    assert any(times > 1 for times in wrong(connection, "q/default").values())


def test_a_message_that_nobody_received_is_caught(connection):
    connection.execute("insert into posted values ('lost')")
    assert wrong(connection, "q/default") == {"lost": 0}


def test_pairs_that_are_not_tied_are_caught(connection):
    for n in ("1", "2"):
        connection.execute(UNTIED, [n, n])
    for queue in ("r", "q"):
        note(connection, None, f"{queue}/default", drain(connection, queue=queue))
    assert misplaced(connection) == {"1", "2"}


def test_received_messages_are_deleted_continuously(connection):
    for _ in range(20):
        fill(connection, range(1000))
        assert len(drain(connection)) == 1000
    connection.execute("select mbus.maintain()")
    assert one(connection, 'select count(*) from mbus."log$q"') == 0
    assert one(connection, "select count(*) from mbus.position where consumer > 0") <= 20


def test_messages_that_many_consumers_received_are_deleted_continuously(connection):
    consumer(connection, "a")
    consumer(connection, "b")
    connection.execute("select setseed(0)")
    for _ in range(30):
        fill(connection, range(1000))
        for name in ("default", "a", "b"):
            assert len(drain(connection, name)) == 1000
    assert one(connection, 'select count(*) from mbus."log$q"') < 10_000
