"""Single messages: CPU of one call, whatever the number of parts, and many workers against the usual table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, cycle

import psycopg

from tests.benchmarks.measure import Report, backend_cpu, cpu_of, ratio, section, side_by_side, wall

PARTS = (1, 16, 256)
ROUNDS = 15
CALLS = 40
WORKERS = 6
EACH = 250
"""The number of messages that each producer posts."""
BATCH = 10
WARMING = 10
"""Calls of each connection before the clock starts. PostgreSQL keeps a plan from the sixth call on."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for parts in PARTS:
            connection.execute("select mbus.create_queue(%s, %s)", [f"s{parts}", parts])
        costs(connection, report)
        workers(connection, conninfo, report)


def calls(connection: psycopg.Connection, query: str) -> float:
    """Microseconds of one call: the minimum of some rounds, because other work on the machine can only add to it."""

    def work() -> None:
        for _ in range(CALLS):
            connection.execute(query, prepare=True)

    return min(cpu_of(connection, work) for _ in range(ROUNDS)) / CALLS * 1e6


def costs(connection: psycopg.Connection, report: Report) -> None:
    # The time to flush a commit depends on the disk.
    connection.execute("set synchronous_commit = off")
    with section("one call in a transaction of its own, CPU of the backend without flushes"):
        report.say("select 1", calls(connection, "select 1"), "us")
        for parts in PARTS:
            queue = f"s{parts}"
            report.say(
                f"post, {parts} parts", calls(connection, f"select mbus.post_{queue}('a=>1')"), "us", most=45
            )
            fill = f"select mbus.postn_{queue}(array_fill('a=>1'::hstore, array[{ROUNDS * CALLS}]))"
            drain = f"select count(*) from mbus.consumen_{queue}_by_default(100000)"
            connection.execute(drain)
            for name, query, goal in (
                ("consume", f"select * from mbus.consume('{queue}')", 250),
                ("consume by name", f"select * from mbus.consume_{queue}_by_default()", 180),
            ):
                connection.execute(fill)
                report.say(f"{name}, {parts} parts", calls(connection, query), "us", most=goal)
            looks(connection, report, queue, f"after single messages, {parts} parts")
            connection.execute(fill)
            connection.execute(drain)
            looks(connection, report, queue, f"after a batch, {parts} parts")
        many = "select mbus.postn_s16(array_fill('a=>1'::hstore, array[1000]))"
        before = backend_cpu(connection)
        for _ in range(ROUNDS):
            connection.execute(many)
        each = (backend_cpu(connection) - before) / ROUNDS / 1000 * 1e6
        report.say("a message of an array of 1,000", each, "us", most=20)
        connection.execute("select mbus.clear_queue_s16()")


def looks(connection: psycopg.Connection, report: Report, queue: str, when: str) -> None:
    consume = calls(connection, f"select * from mbus.consume('{queue}')")
    report.say(f"consume of an empty queue {when}", consume, "us", most=100)
    peek = calls(connection, f"select mbus.peek_{queue}()")
    report.say(f"peek at an empty queue {when}", peek, "us", most=100)


def workers(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Measure producers and consumers at once, each call in its own transaction, until every message is received."""
    connection.execute("create table plain (id bigserial primary key, data hstore)")
    connection.execute("select mbus.create_queue('crowd', 16)")
    rows = "insert into plain (data) select 'a=>1' from generate_series(1, {})"
    taken = (
        "delete from plain where id = any (array(select id from plain order by id limit {} for update skip locked)) "
        "returning id"
    )
    ours = {
        1: ("select mbus.post_crowd('a=>1')", "select id from mbus.consume_crowd_by_default()"),
        BATCH: (
            f"select mbus.postn_crowd(array_fill('a=>1'::hstore, array[{BATCH}]))",
            f"select id from mbus.consumen_crowd_by_default({BATCH})",
        ),
    }
    plain = {size: (rows.format(size), taken.format(size)) for size in ours}
    for title, sizes, goal in (
        ("one message each", [1], 0.5),
        (f"one message or {BATCH}, by turns", [1, BATCH], None),
    ):
        with section(f"{WORKERS} producers and {WORKERS} consumers of {title} / FOR UPDATE SKIP LOCKED"):
            mine, bare = side_by_side(
                5,
                *(
                    partial(crowd, conninfo, [calls[size] for size in sizes], sizes)
                    for calls in (ours, plain)
                ),
            )
            report.say("messages a second", WORKERS * EACH / sorted(mine)[2], "/s")
            report.say("rate", 1 / ratio(mine, bare), "x", least=goal)


def crowd(conninfo: str, queries: Sequence[tuple[str, str]], sizes: Sequence[int]) -> float:
    """Return the seconds until every message was received. The connections have planned their queries before.

    ``queries`` are how to post and how to consume. ``sizes`` are the numbers of messages of a call, used in turn.
    """
    received = 0
    counted = threading.Lock()

    def produce(connection: psycopg.Connection) -> None:
        posted = 0
        for (post, _), size in cycle(zip(queries, sizes, strict=True)):
            connection.execute(post, prepare=True)
            posted += size
            if posted >= EACH:
                return

    def consume(connection: psycopg.Connection) -> None:
        nonlocal received
        for _, take in cycle(queries):
            found = len(connection.execute(take, prepare=True).fetchall())
            with counted:
                received += found
            if received >= wanted:
                return

    wanted = WORKERS * next(posted for posted in accumulate(cycle(sizes)) if posted >= EACH)
    producers, consumers = (
        [psycopg.connect(conninfo, autocommit=True) for _ in range(WORKERS)] for _ in range(2)
    )
    for _ in range(WARMING):
        for producer, consumer in zip(producers, consumers, strict=True):
            for post, take in queries:
                producer.execute(post, prepare=True)
                consumer.execute(take, prepare=True)
    crew: list[tuple[Callable[[psycopg.Connection], None], psycopg.Connection]] = [
        *((produce, connection) for connection in producers),
        *((consume, connection) for connection in consumers),
    ]
    with ThreadPoolExecutor(len(crew)) as pool:
        spent = wall(lambda: [task.result() for task in [pool.submit(work, by) for work, by in crew]])
    for _, connection in crew:
        connection.close()
    return spent
