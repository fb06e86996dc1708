"""A first mirror of two million touched rows, by key and in one transaction. It is compared with Spark's JDBC, which
reads the table and appends it to another. It is timed once more with the setting of Spark that docs/spark.md names for
faster executors."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from itertools import count

import psycopg

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.results.merge import merge
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.request import Work
from demo.flights import DDL
from tests.benchmarks.lake import LIMIT, NO_LIMIT
from tests.benchmarks.measure import Report, ratio, section, side_by_side, wall
from tests.benchmarks.spark import BATCH, DRIVER, MOVEMENTS, PARTITIONS, session, url

ROWS = int(os.environ.get("ROWS", "2000000"))
ROUNDS = 3


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(DDL)
        row = connection.execute("select revision.track('public.movement')").fetchone()
        connection.execute(MOVEMENTS.format(ROWS))
        connection.execute("create table public.copied (like public.movement including indexes)")
        connection.execute("vacuum analyze public.movement")
        connection.execute("analyze revision.commit_queue")
    spark, branch, names = session(), row[0] if row else 0, count()
    usual = spark.conf.get(LIMIT)
    assert usual is not None
    parts: dict[str, list[float]] = {"claim": [], "staging": [], "merge": []}

    def emptied() -> None:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("truncate public.copied")
            connection.execute("checkpoint")

    def ours() -> float:
        emptied()
        spark.conf.set(LIMIT, usual)
        return wall(mirrored)

    def without_limit() -> float:
        emptied()
        spark.conf.set(LIMIT, NO_LIMIT)
        return wall(lambda: mirrored(measured=False))

    def mirrored(measured: bool = True) -> None:
        feed = CommitFeed(f"mirror{next(names)}", branch)
        with ConsumerTransaction(feed, conninfo) as consumer:
            steps = _steps(consumer, feed)
            for seconds in parts.values():
                took = wall(lambda: next(steps))
                if measured:
                    seconds.append(took)

    def _steps(consumer: ConsumerTransaction, feed: CommitFeed) -> Iterator[None]:
        batch = consumer.claim(ROWS)
        assert batch is not None
        assert batch.count == ROWS
        yield
        job = Job(spark, Work(feed, batch, conninfo, conninfo))
        job.mirror("public.movement", into="public.copied", key="id")
        yield
        consumer.ack(lambda connection: merge(connection, batch, job.staged))
        yield

    def jdbc() -> float:
        emptied()
        return wall(read_and_appended)

    def read_and_appended() -> None:
        bounds = {
            "partitionColumn": "id",
            "lowerBound": "1",
            "upperBound": str(ROWS),
            "numPartitions": str(PARTITIONS),
        }
        frame = spark.read.format("jdbc").options(
            driver=DRIVER, url=url(conninfo), fetchsize=BATCH, dbtable="public.movement", **bounds
        ).load()  # fmt: skip
        frame.write.format("jdbc").options(
            driver=DRIVER, url=url(conninfo, reWriteBatchedInserts="true", stringtype="unspecified"),
            dbtable="public.copied", batchsize=BATCH,
        ).mode("append").save()  # fmt: skip

    with section(f"a mirror of {ROWS:,} touched rows into an empty table"):
        ours()
        jdbc()
        for seconds in parts.values():
            seconds.clear()
        mirrors, unlimited, appends = side_by_side(ROUNDS, ours, without_limit, jdbc)
        report.say("mirror", statistics.median(mirrors), "s")
        for name, seconds in parts.items():
            report.say(f"  {name}", statistics.median(seconds), "s")
        report.say("JDBC, read and appended", statistics.median(appends), "s")
        report.say("JDBC / mirror", ratio(appends, mirrors), "x", least=0.7)
        report.say(
            "JDBC / mirror without a limit of bytes in a batch", ratio(appends, unlimited), "x", least=0.7
        )
    spark.stop()
