"""Message queues against COPY and SELECT of a bare table, and what waiting messages and old snapshots cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import psycopg

from tests.benchmarks.measure import Report, backend_cpu, cpu_of, ratio, section, side_by_side
from tests.tubes import one

TOTAL = 8_000
WAITING = 100_000
SECONDS = 30
HEADERS = (
    '\'seenby=>"{postgres}", source_db=>postgres, destination_queue=>b1000_16, '
    'enqueue_time=>"2024-01-01 00:00:00.123456", destination=>b1000_16\''
)
"""The headers of a message. The bare table has the same rows as the queue returns."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for batch in (1000, 100):
            for subscribers in (1, 4, 16):
                throughput(connection, report, batch, subscribers)
        waiting(connection, report)
        old_snapshot(connection, conninfo, report)


def spent_by_both(connection: psycopg.Connection, work: Callable[[], object]) -> float:
    """Return the CPU seconds of the backend and of this process, which posts messages and reads what it received."""
    before = time.process_time()
    return cpu_of(connection, work) + time.process_time() - before


def rows(batch: int) -> str:
    """Return a batch of messages of 1 kB in COPY's text format, each with a property for selectors."""
    return "".join(f'"body"=>"{"x" * 1000}"\t"kind"=>"{n % 16}"\n' for n in range(batch))


def copy(connection: psycopg.Connection, table: str, text: str) -> None:
    with connection.cursor().copy(f"copy {table} (data, properties) from stdin") as out:
        out.write(text)


def throughput(connection: psycopg.Connection, report: Report, batch: int, subscribers: int) -> None:
    """Post and receive in turn. Every subscriber gets every message, all except the first by a selector. A tenth of the
    batches has a message that waits for another message.

    The bare table is read as often: each batch once for every subscriber, by its index. A plan from the time when the
    table was small would not use the index. Both sides keep the rows of an answer until the next answer, because
    freeing their memory costs as much as reading them.
    """
    queue = f"b{batch}_{subscribers}"
    connection.execute("select mbus.create_queue(%s, 16)", [queue])
    names = [f"c{n}" for n in range(1, subscribers)]
    for name in names:
        connection.execute(
            "select mbus.create_consumer(%s, %s, %s)", [name, queue, "t.properties->'kind' <> 'x'"]
        )
    connection.execute(
        f"create table plain_{queue} (id bigserial primary key, added timestamp default clock_timestamp(), iid text, "
        "delayed_until timestamp, expires timestamp, received integer[], headers hstore default "
        f"{HEADERS}, properties hstore, data hstore)"
    )
    text = rows(batch)
    calls = [f"select * from mbus.consumen_{queue}_by_{name}({batch})" for name in ["default", *names]]

    def plain() -> float:
        above = [one(connection, f"select coalesce(max(id), 0) from plain_{queue}")]

        query = f"select * from plain_{queue} where id > %s order by id limit {batch}"

        def work() -> None:
            for _ in range(TOTAL // batch):
                copy(connection, f"plain_{queue}", text)
                for _ in range(subscribers):
                    found = connection.execute(query, above).fetchall()
                above[0] = found[-1][0]

        return spent_by_both(connection, work)

    def ours() -> float:
        received = 0

        def work() -> None:
            nonlocal received
            for n in range(TOTAL // batch):
                copy(connection, f'mbus."log${queue}"', text)
                if n % 10 == 0:
                    connection.execute(
                        f"select mbus.post_{queue}('a=>2', hstore('consume_after', mbus.post_{queue}('a=>1')), 'kind=>1')"
                    )
                for call in calls:
                    found = connection.execute(call).fetchall()
                    received += len(found)

        spent = spent_by_both(connection, work)
        for call in calls:
            while some := len(connection.execute(call).fetchall()):
                received += some
        assert received >= TOTAL * subscribers
        return spent

    with section(
        f"post and receive / COPY and SELECT, batches of {batch}, {subscribers} subscribers, CPU of both ends"
    ):
        ours()
        copy(connection, f"plain_{queue}", rows(TOTAL))
        connection.execute(f"analyze plain_{queue}")
        mine, bare = side_by_side(9, ours, plain)
        report.say("rate", 1 / ratio(mine, bare), "x", least=0.45)
        report.say("a message posted and received by all", statistics.median(mine) / TOTAL * 1e6, "us")
    connection.execute("select mbus.drop_queue(%s)", [queue])


def waiting(connection: psycopg.Connection, report: Report) -> None:
    for queue in ("free", "blocked", "elsewhere"):
        connection.execute("select mbus.create_queue(%s, 16)", [queue])
    first = one(connection, "select mbus.post_elsewhere('a=>1')")
    connection.execute(
        "select mbus.postn_blocked(array_fill('a=>1'::hstore, array[%s]), "
        "array_fill(hstore('consume_after', %s), array[%s]))",
        [WAITING, first, WAITING],
    )
    while connection.execute("select * from mbus.consumen_blocked_by_default(1000)").fetchall():
        pass
    connection.execute("vacuum analyze")

    def received(queue: str, amount: int) -> float:
        connection.execute(
            f"select mbus.postn_{queue}(array_fill('a=>1'::hstore, array[%s]))", [200 * amount]
        )
        call = f"select * from mbus.consumen_{queue}_by_default({amount})"

        def work() -> None:
            for _ in range(200):
                assert len(connection.execute(call).fetchall()) == amount

        return cpu_of(connection, work)

    with section(f"{WAITING:,} messages that wait for another one / none, CPU of consuming the others"):
        for amount in (1, 100):
            figures = side_by_side(
                15, partial(received, "blocked", amount), partial(received, "free", amount)
            )
            report.say(f"{amount} at a time", ratio(*figures), "x", most=1.2)


def old_snapshot(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    connection.execute("select mbus.create_queue('old', 16)")
    text = rows(100)

    def second(receive: Callable[[], int]) -> float:
        before = backend_cpu(connection)
        for _ in range(50):
            copy(connection, 'mbus."log$old"', text)
            for _ in range(5):
                receive()
        while receive():
            pass
        return backend_cpu(connection) - before

    def receive() -> int:
        found = len(connection.execute("select * from mbus.consumen_old_by_default(100)").fetchall())
        return found + len(connection.execute("select * from mbus.consume_old_by_default()").fetchall())

    with psycopg.connect(conninfo) as old, section(f"{SECONDS} rounds of load under an old snapshot, CPU"):
        second(receive)
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        costs = [second(receive) for _ in range(SECONDS)]
        first, last = statistics.median(costs[:3]), statistics.median(costs[-3:])
        report.say("first", first, "s")
        report.say("last", last, "s")
        report.say("last / first", last / first, "x", most=1.5)
