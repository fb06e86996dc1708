"""Single messages: CPU of one call, whatever the number of parts, and many workers against the usual table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg

from tests.benchmarks.measure import Report, backend_cpu, cpu_of, ratio, section, side_by_side, wall

PARTS = (1, 16, 256)
ROUNDS = 15
CALLS = 40
WORKERS = 6
EACH = 250
"""Messages that each of the producers posts."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for parts in PARTS:
            connection.execute("select mbus.create_queue(%s, %s)", [f"s{parts}", parts])
        costs(connection, report)
        workers(connection, conninfo, report)


def calls(connection: psycopg.Connection, query: str) -> float:
    """Microseconds of one call: the least of some rounds, as other work on the machine only adds."""

    def work() -> None:
        for _ in range(CALLS):
            connection.execute(query, prepare=True)

    return min(cpu_of(connection, work) for _ in range(ROUNDS)) / CALLS * 1e6


def costs(connection: psycopg.Connection, report: Report) -> None:
    # What it takes to flush a commit is the disk's.
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
    """Producers and consumers at once, each message in a transaction of its own, until all are received."""
    connection.execute("create table plain (id bigserial primary key, data hstore)")
    connection.execute("select mbus.create_queue('crowd', 16)")
    plain = (
        "insert into plain (data) values ('a=>1')",
        "delete from plain where id = (select id from plain order by id limit 1 for update skip locked) returning id",
    )
    ours = ("select mbus.post_crowd('a=>1')", "select id from mbus.consume_crowd_by_default()")
    with section(f"{WORKERS} producers and {WORKERS} consumers of one message each / FOR UPDATE SKIP LOCKED"):
        mine, bare = side_by_side(5, partial(crowd, conninfo, ours), partial(crowd, conninfo, plain))
        report.say("messages a second", WORKERS * EACH / sorted(mine)[2], "/s")
        report.say("rate", 1 / ratio(mine, bare), "x", least=1)


def crowd(conninfo: str, queries: Sequence[str]) -> float:
    """Seconds until all that producers post was received."""
    received = 0
    counted = threading.Lock()

    def produce(connection: psycopg.Connection) -> None:
        for _ in range(EACH):
            connection.execute(queries[0], prepare=True)

    def consume(connection: psycopg.Connection) -> None:
        nonlocal received
        while received < WORKERS * EACH:
            if connection.execute(queries[1], prepare=True).fetchone():
                with counted:
                    received += 1

    crew: list[tuple[Callable[[psycopg.Connection], None], psycopg.Connection]] = [
        (work, psycopg.connect(conninfo, autocommit=True))
        for work in (produce, consume)
        for _ in range(WORKERS)
    ]
    with ThreadPoolExecutor(len(crew)) as pool:
        spent = wall(lambda: [each.result() for each in [pool.submit(work, by) for work, by in crew]])
    for _, connection in crew:
        connection.close()
    return spent
