"""The costs of tubes: capture, backfill, and reading and deleting under an old snapshot."""

from __future__ import annotations

from collections import deque
from functools import partial

import psycopg

from airflow_pgchange import tubes
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from tests.benchmarks.flights import FLIGHT, written
from tests.benchmarks.measure import Cost, Report, backend_cpu, cpu_of, ratio, section, side_by_side

GOALS = {
    1: {"insert": 1.4, "update": 2.3, "delete": 3.4},
    100: {"insert": 1.2, "update": 1.2, "delete": 1.5},
    10_000: {"insert": 1.2, "update": 1.3, "delete": 1.5},
}
STATEMENTS = {1: 2_000, 100: 200, 10_000: 2}
TURNS = 21
"""The number of measurements.

Each is short, because the speed of the machine varies by more than the measured difference.
"""
BACKFILLED = 5_000_000
PODS_A_SECOND, SECONDS = 20_000, 30
SIMPLE = """
create table simple_pods (op char(1), shard int, ids bigint[], txid xid8 default pg_current_xact_id());
create function record_ids() returns trigger language plpgsql as $$
begin
    insert into simple_pods (op, shard, ids) select left(tg_op, 1), tg_argv[0]::int, array_agg(id) from touched;
    return null;
end $$;
create trigger inserted after insert on simple referencing new table as touched
    for each statement execute function record_ids('0');
create trigger updated after update on simple referencing new table as touched
    for each statement execute function record_ids('0');
create trigger deleted after delete on simple referencing old table as touched
    for each statement execute function record_ids('0')
"""
"""Triggers that only record the ids of a statement. They miss the old ids of rows whose id an update changes."""
FEED = TubeFeed("q")


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        capture(connection, report)
        backfill(connection, report)
        deletion(connection, conninfo, report)


def capture(connection: psycopg.Connection, report: Report) -> None:
    for name in ("plain", "simple", "touching", "crowded"):
        connection.execute(f"create table {name} ({FLIGHT})")
    connection.execute(SIMPLE)
    for tube, workers, table in (("few", 1, "touching"), ("many", 64, "crowded")):
        tubes.ensure(connection, tube, workers)
        tubes.attach(connection, tube, f"public.{table}", shard=0)
    for rows, statements in STATEMENTS.items():
        with section(f"capture / no trigger, {rows} rows a statement"):
            for op, goal in GOALS[rows].items():
                write = partial(written, connection, op, rows, statements, emptied="few, many, simple_pods")
                plain, simple, touching, crowded = side_by_side(
                    TURNS, *(partial(write, name) for name in ("plain", "simple", "touching", "crowded"))
                )
                report.say(op, ratio(waited(touching), waited(plain)), "x", most=goal)
                report.say(f"{op}, CPU of the server", ratio(cpu(touching), cpu(plain)), "x")
                report.say(f"{op}, CPU of the server, simple triggers", ratio(cpu(simple), cpu(plain)), "x")
                report.say(
                    f"{op}, 64 workers / 1 worker, CPU", ratio(cpu(crowded), cpu(touching)), "x", most=1.1
                )


def waited(costs: list[Cost]) -> list[float]:
    return [cost.waited for cost in costs]


def cpu(costs: list[Cost]) -> list[float]:
    return [cost.cpu for cost in costs]


def backfill(connection: psycopg.Connection, report: Report) -> None:
    connection.execute("create table planes (id bigint primary key, built date)")
    connection.execute(
        "insert into planes select g, date '2000-01-01' + (g::bigint * 7919 % 5000)::int "
        f"from generate_series(1, {BACKFILLED}) as g"
    )
    connection.execute("create index on planes (built, id)")
    connection.execute("vacuum analyze planes")
    tubes.ensure(connection, "planes_tube")
    tubes.attach(connection, "planes_tube", "public.planes", shard=0)

    def ours() -> float:
        connection.execute("truncate planes_tube")
        return cpu_of(connection, lambda: tubes.backfill(connection, "planes_tube", "public.planes", "built"))

    def read(query: str) -> float:
        return cpu_of(connection, lambda: connection.execute(query))

    def copied(query: str) -> float:
        def work() -> None:
            with connection.cursor() as cursor, cursor.copy(f"copy ({query}) to stdout") as out:
                deque(out, maxlen=0)

        return cpu_of(connection, work)

    query = "select id from planes order by built, id"
    with section(f"backfill of {BACKFILLED:,} ids / select id order by, CPU of the backend"):
        figures, selected, by_copy = side_by_side(TURNS, ours, partial(read, query), partial(copied, query))
        report.say("backfill", ratio(figures, selected), "x", most=1.6)
        report.say("backfill, against copy of the same rows", ratio(figures, by_copy), "x")
    connection.execute("drop table planes cascade")


def deletion(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    tubes.ensure(connection, FEED.tube)
    costs = []
    with (
        psycopg.connect(conninfo) as old,
        section("reading and deleting under an old snapshot, CPU of a second's pods"),
    ):
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        for second in range(SECONDS):
            connection.execute(
                f"insert into {FEED.tube} (shard, ids) select 0, array[g] from generate_series(1, {PODS_A_SECOND}) as g"
            )
            costs.append(worked(conninfo))
            if second in (0, SECONDS - 1):
                report.say(f"second {second + 1}", costs[-1], "s")
        report.say("last second / first", costs[-1] / costs[0], "x", most=1.5)


def worked(conninfo: str) -> float:
    """Return the CPU time to claim, read and delete everything that is ready."""
    spent = 0.0
    while True:
        with ConsumerTransaction(FEED, conninfo) as consumer:
            backends = (consumer._keeper, consumer._reader)
            before = sum(map(backend_cpu, backends))
            if consumer.claim(5_000) is None:
                return spent
            deque(consumer.changes(), maxlen=0)
            consumer.ack()
            spent += sum(map(backend_cpu, backends)) - before
