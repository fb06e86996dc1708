"""A first mirror of two million touched rows, by key and in one transaction, beside Spark's JDBC.

JDBC reads the table and appends it to another. The mirror is timed once more with the setting of Spark that
docs/how-to/spark.md names for faster executors.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from functools import partial

import psycopg

from airflow_pgchange import tubes
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.results.merge import merge
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.request import Work
from tests.benchmarks.flights import FLIGHT
from tests.benchmarks.flights import ROWS as FILLED
from tests.benchmarks.lake import LIMIT, NO_LIMIT
from tests.benchmarks.measure import Report, ratio, section, side_by_side, wall
from tests.benchmarks.spark import BATCH, DRIVER, PARTITIONS, session, url

ROWS = int(os.environ.get("ROWS", "2000000"))
ROUNDS = 3
FEED = TubeFeed("mirror_tube")
PARTS = ("claim", "staging", "merge")


def run(conninfo: str, report: Report) -> None:
    spark = session()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for name in ("source", "copied", "copied_by_jdbc"):
            connection.execute(f"create table {name} ({FLIGHT})")
        connection.execute(FILLED.format("source", 1, ROWS))
        connection.execute("vacuum analyze source")
        tubes.ensure(connection, FEED.tube)
    usual = spark.conf.get(LIMIT)
    assert usual is not None

    def touch() -> None:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("truncate copied, copied_by_jdbc")
            connection.execute(
                f"insert into {FEED.tube} (shard, ids) select 0, array(select generate_series(g, g + 899)) "
                f"from generate_series(1, {ROWS}, 900) as g"
            )
            connection.execute("checkpoint")

    def ours(limit: str) -> list[float]:
        """Return the seconds that each part of our mirror takes."""
        touch()
        spark.conf.set(LIMIT, limit)
        with ConsumerTransaction(FEED, conninfo) as consumer:
            steps = mirrored(consumer)
            return [wall(lambda: next(steps)) for _ in PARTS]

    def mirrored(consumer: ConsumerTransaction) -> Iterator[None]:
        batch = consumer.claim(2 * ROWS)
        assert batch is not None
        yield
        job = Job(spark, Work(FEED, batch, conninfo, conninfo))
        job.mirror("public.source", "public.copied", key="id")
        yield
        consumer.ack(lambda c: merge(c, batch, job.staged))
        yield

    def jdbc() -> list[float]:
        touch()
        return [wall(read_and_appended)]

    def read_and_appended() -> None:
        reader = spark.read.format("jdbc").options(
            driver=DRIVER, url=url(conninfo), fetchsize=BATCH, dbtable="public.source", partitionColumn="id",
            lowerBound="1", upperBound=str(ROWS), numPartitions=str(PARTITIONS),
        )  # fmt: skip
        reader.load().write.format("jdbc").options(
            driver=DRIVER, url=url(conninfo, reWriteBatchedInserts="true", stringtype="unspecified"),
            dbtable="public.copied_by_jdbc", batchsize=BATCH,
        ).mode("append").save()  # fmt: skip

    contenders = partial(ours, usual), partial(ours, NO_LIMIT), jdbc
    with section(f"a mirror of {ROWS:,} touched rows into an empty table, warm Spark session"):
        for warm in contenders:
            warm()
        mirrors, unlimited, appends = side_by_side(ROUNDS, *contenders)
        totals, unlimited_totals, appended = (
            [sum(row) for row in rows] for rows in (mirrors, unlimited, appends)
        )
        report.say("mirror, by keys, in one transaction", statistics.median(totals), "s")
        for name, seconds in zip(PARTS, zip(*mirrors, strict=True), strict=True):
            report.say(f"  {name}", statistics.median(seconds), "s")
        report.say("the same without a limit of bytes in a batch", statistics.median(unlimited_totals), "s")
        report.say("JDBC, read and append", statistics.median(appended), "s")
        report.say("JDBC / mirror", ratio(appended, totals), "x", least=0.7)
        report.say("JDBC / mirror without that limit", ratio(appended, unlimited_totals), "x", least=0.7)
    spark.stop()
