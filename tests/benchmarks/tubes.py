"""The costs of tubes: capture, backfill, reading and deleting under an old snapshot, and a mirror that Spark keeps."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial

import psycopg
from pyspark.sql import SparkSession

from airflow_pgchange import tubes
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.results.merge import merge
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.request import Work
from tests.benchmarks.flights import FLIGHT, ROWS, written
from tests.benchmarks.measure import Cost, Report, backend_cpu, cpu_of, ratio, section, side_by_side, wall
from tests.benchmarks.spark import DRIVER, JDBC, PARTITIONS, session, url

GOALS = {
    1: {"insert": 1.4, "update": 2.3, "delete": 3.4},
    100: {"insert": 1.2, "update": 1.2, "delete": 1.5},
}
STATEMENTS = {1: 2_000, 100: 200}
TURNS = 21
"""Many short turns, because the speed of the machine changes by more than the difference to measure."""
BACKFILLED = 5_000_000
PODS_A_SECOND, SECONDS = 20_000, 30
MIRRORED = 2_000_000
FEED = TubeFeed("q")


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        capture(connection, report)
        backfill(connection, report)
        deletion(connection, conninfo, report)
    if not JDBC.exists():
        sys.exit(f"no JDBC driver at {JDBC}: apt install libpostgresql-jdbc-java, or set PGJDBC to its path")
    spark = session()
    mirror(spark, conninfo, report)
    spark.stop()


def capture(connection: psycopg.Connection, report: Report) -> None:
    for name in ("plain", "touching", "crowded"):
        connection.execute(f"create table {name} ({FLIGHT})")
    for tube, workers, table in (("few", 1, "touching"), ("many", 64, "crowded")):
        tubes.ensure(connection, tube, workers)
        tubes.attach(connection, tube, f"public.{table}", shard=0)
    for rows, statements in STATEMENTS.items():
        with section(f"capture / no trigger, {rows} rows a statement"):
            for op, goal in GOALS[rows].items():
                write = partial(written, connection, op, rows, statements, emptied="few, many")
                plain, touching, crowded = side_by_side(
                    TURNS, partial(write, "plain"), partial(write, "touching"), partial(write, "crowded")
                )
                report.say(op, ratio(waited(touching), waited(plain)), "x", most=goal)
                report.say(f"{op}, CPU of the server", ratio(cpu(touching), cpu(plain)), "x")
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


def mirror(spark: SparkSession, conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for name in ("source", "copied", "copied_by_jdbc"):
            connection.execute(f"create table {name} ({FLIGHT})")
        connection.execute(ROWS.format("source", 1, MIRRORED))
        connection.execute("vacuum analyze source")
        tubes.ensure(connection, "mirror_tube")
        feed = TubeFeed("mirror_tube")

        def touch() -> None:
            connection.execute("truncate copied, copied_by_jdbc")
            connection.execute(
                "insert into mirror_tube (shard, ids) select 0, array(select generate_series(g, g + 899)) "
                f"from generate_series(1, {MIRRORED}, 900) as g"
            )

        def ours() -> None:
            with ConsumerTransaction(feed, conninfo) as consumer:
                batch = consumer.claim(2 * MIRRORED)
                assert batch is not None
                job = Job(spark, Work(feed, batch, conninfo, conninfo))
                job.mirror("public.source", "public.copied", key="id")
                consumer.ack(lambda c: merge(c, batch, job.staged))

        def jdbc() -> None:
            reader = spark.read.format("jdbc").options(
                driver=DRIVER, url=url(conninfo), fetchsize="10000", dbtable="public.source", partitionColumn="id",
                lowerBound="1", upperBound=str(MIRRORED), numPartitions=str(PARTITIONS),
            )  # fmt: skip
            reader.load().write.format("jdbc").options(
                driver=DRIVER, url=url(conninfo, reWriteBatchedInserts="true", stringtype="unspecified"),
                dbtable="public.copied_by_jdbc", batchsize="10000",
            ).mode("append").save()  # fmt: skip

        def timed(work: Callable[[], None]) -> float:
            touch()
            return wall(work)

        with section(f"a mirror of {MIRRORED:,} touched rows, warm Spark session, seconds"):
            figures = side_by_side(3, lambda: timed(ours), lambda: timed(jdbc))
            for name, row in zip(
                ("mirror, by keys, in one transaction", "JDBC, read and append"), figures, strict=True
            ):
                report.say(f"{name}, rows a second", MIRRORED / sorted(row)[1], "rows/s")
            report.say("mirror / JDBC, time", ratio(*figures), "x")
