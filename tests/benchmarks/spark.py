"""Five million rows in and out of a warm Spark session, against Spark's JDBC and plain COPY; and a whole submit.

``ROWS`` says how many rows. ``PGJDBC`` is the path of PostgreSQL's JDBC driver; it is in Debian's
libpostgresql-jdbc-java.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.feed import partitions
from airflow_pgchange.feeds.key_columns import KeyColumn
from airflow_pgchange.feeds.reading import current_rows
from airflow_pgchange.results import staging
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.spark import submit
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.request import Work
from airflow_pgchange.spark.table_sink import TableSink
from airflow_pgchange.spark.types import staging_types
from demo.flights import DDL
from demo.spark import clean_environment
from tests import airflow_home
from tests.benchmarks.measure import Report, ratio, section, side_by_side, wall

ROWS = int(os.environ.get("ROWS", "5000000"))
JDBC = Path(os.environ.get("PGJDBC", "/usr/share/java/postgresql.jar"))
DRIVER = "org.postgresql.Driver"
PARTITIONS = 2
ROUNDS = 3
BATCH = 10_000
"""The number of rows that JDBC fetches and sends at a time. JDBC is slower with its defaults."""

MOVEMENTS = """
insert into public.movement (kind, flight_date, carrier, flight, origin, dest, at, delay)
select (array['departure', 'arrival', 'cancellation'])[1 + n % 3], '2013-01-01', 'UA', n % 9999, 'EWR', 'IAH',
       '2013-01-01 05:17', n % 60
from generate_series(1, {}) as n
"""
BY_HAND = """
from pyspark.sql import SparkSession
from pyspark.sql.functions import count, sum
spark = SparkSession.builder.getOrCreate()
jdbc = {{"driver": {driver!r}, "url": {url!r}}}
rows = spark.read.format("jdbc").options(**jdbc, dbtable="(select * from public.movement limit 1000) m").load()
figures = rows.groupBy("carrier").agg(count("*").alias("n"), sum("delay").alias("delay"))
figures.write.format("jdbc").options(**jdbc, dbtable="public.by_hand").mode("append").save()
"""
OURS = """
from pyspark.sql.functions import count, sum
from airflow_pgchange.spark.entry_point import batch_job
with batch_job() as job:
    rows = job.rows("public.movement", key="id")
    figures = rows.groupBy("carrier").agg(count("*").alias("n"), sum("delay").alias("delay"))
    job.merge(figures, into="public.by_batch", key="carrier", mode="add")
"""
OPERATE = """
import json, sys
from tests import airflow_home
airflow_home.prepare()
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators.spark import SparkBatchOperator
from tests.benchmarks.measure import wall
given = json.loads(sys.argv[1])
task = SparkBatchOperator(task_id="count", feed=CommitFeed("submitted", given["branch"]), postgres_conn_id="here",
                          limit=1000, application=given["application"], fast_start=given["fast"],
                          conf={"spark.ui.enabled": "false"})
task.ping_every = 30
seconds = wall(lambda: print(task.execute({})))
open(given["seconds"], "w").write(str(seconds))
"""


def run(conninfo: str, report: Report) -> None:
    spark = session()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(DDL)
        row = connection.execute("select revision.track('public.movement')").fetchone()
        connection.execute(MOVEMENTS.format(ROWS))
        connection.execute("vacuum analyze public.movement")
        connection.execute("analyze revision.commit_queue")
    feed = CommitFeed("read", row[0] if row else 0)
    with section(f"reading a batch of {ROWS:,} rows into a warm Spark session"):
        read(spark, feed, conninfo, report)
    with section(f"writing {ROWS:,} rows from a warm Spark session"):
        write(spark, feed, conninfo, report)
    spark.stop()
    with section("a batch of 1,000 changes from submit to commit"):
        whole(conninfo, feed.branch, report)


def session() -> SparkSession:
    """Start a session with PostgreSQL's JDBC driver."""
    if not JDBC.exists():
        sys.exit(f"no JDBC driver at {JDBC}: apt install libpostgresql-jdbc-java, or set PGJDBC to its path")
    os.environ.update(clean_environment() | {"PYSPARK_PYTHON": sys.executable})
    settings = {
        "spark.jars": str(JDBC),
        "spark.ui.enabled": "false",
        "spark.driver.memory": "2g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.submit.pyFiles": submit.py_files(),
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(f"local[{PARTITIONS}]").appName("benchmark")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def url(conninfo: str, **options: str) -> str:
    server = conninfo_to_dict(conninfo)
    told = "&".join(f"{name}={value}" for name, value in {"user": "postgres", **options}.items())
    return f"jdbc:postgresql://{server['host']}:{server['port']}/{server['dbname']}?{told}"


def nowhere(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def read(spark: SparkSession, feed: CommitFeed, conninfo: str, report: Report) -> None:
    with ConsumerTransaction(feed, conninfo) as consumer:
        batch = consumer.claim(ROWS)
        assert batch is not None
        assert batch.count == ROWS
        job = Job(spark, Work(feed, batch, conninfo, conninfo))
        consumer.ack()
    parts = [
        current_rows(part, "public.movement", (KeyColumn("id"),)).query
        for part in partitions(feed, batch, PARTITIONS)
    ]
    reader = spark.read.format("jdbc").options(driver=DRIVER, url=url(conninfo), fetchsize=BATCH)

    def same_queries() -> None:
        frames = [reader.option("dbtable", f"({query}) as part").load() for query in parts]
        nowhere(frames[0].unionAll(frames[1]) if len(frames) == 2 else frames[0])

    def plain_table() -> None:
        bounds = {
            "partitionColumn": "id",
            "lowerBound": "1",
            "upperBound": str(ROWS),
            "numPartitions": str(PARTITIONS),
        }
        nowhere(spark.read.format("jdbc").options(
            driver=DRIVER, url=url(conninfo), fetchsize=BATCH, dbtable="public.movement", **bounds).load())  # fmt: skip

    def ours() -> None:
        nowhere(job.rows("public.movement", key="id"))

    def copy() -> None:
        with psycopg.connect(conninfo) as connection, connection.cursor() as cursor:
            cursor.execute("select 1")
            with cursor.copy("copy public.movement to stdout") as out:
                for _ in out:
                    pass

    for warm in (ours, same_queries, plain_table):
        warm()
    compare(
        report, ours,
        {"JDBC, the same queries": (same_queries, 1.15), "JDBC, the table alone": (plain_table, None),
         "COPY of the table to nowhere": (copy, None)},
    )  # fmt: skip


def movements(spark: SparkSession, rows: int) -> DataFrame:
    """Return rows of the operations log that Spark computes itself."""
    return spark.range(0, rows, 1, PARTITIONS).selectExpr(
        "id", "element_at(array('departure', 'arrival', 'cancellation'), cast(1 + id % 3 as int)) as kind",
        "date'2013-01-01' as flight_date", "'UA' as carrier", "cast(id % 9999 as int) as flight", "'EWR' as origin",
        "'IAH' as dest", "timestamp_ntz'2013-01-01 05:17:00' as at", "cast(id % 60 as int) as delay",
    )  # fmt: skip


def write(spark: SparkSession, feed: CommitFeed, conninfo: str, report: Report) -> None:
    frame = movements(spark, ROWS)
    columns = staging_types(frame.schema)
    definition = ", ".join(f"{name} {kind}" for name, kind in columns.items())
    batch = claimed(conninfo, feed)
    with psycopg.connect(conninfo, autocommit=True) as connection:

        def ours() -> None:
            table = staging.create(connection, batch, "public.movement", list(columns.items()))
            empty = staging.Staged(
                "public.movement",
                ("id",),
                Mode.APPEND,
                table,
                tuple(columns.items()),
                (),
                batch.id,
                batch.attempt,
            )
            TableSink(conninfo, empty).stage(frame)
            connection.execute(f'drop table pgchange_staging."{table}"')

        def jdbc() -> None:
            connection.execute(f"create unlogged table public.staged ({definition})")
            frame.write.format("jdbc").options(
                driver=DRIVER, url=url(conninfo, reWriteBatchedInserts="true", stringtype="unspecified"),
                dbtable="public.staged", batchsize=BATCH,
            ).mode("append").save()  # fmt: skip
            connection.execute("drop table public.staged")

        with tempfile.TemporaryDirectory(prefix="pgchange-") as folder:
            Path(folder).chmod(0o777)
            connection.execute(f"copy public.movement to '{folder}/rows'")

            def copy() -> None:
                connection.execute("create unlogged table public.staged (like public.movement)")
                connection.execute(f"copy public.staged from '{folder}/rows'")
                connection.execute("drop table public.staged")

            ours()
            jdbc()
            compare(report, ours, {"JDBC": (jdbc, 1.5), "COPY from a file of the server": (copy, None)})


def claimed(conninfo: str, feed: CommitFeed) -> Any:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(MOVEMENTS.format(1))
    with ConsumerTransaction(feed, conninfo) as consumer:
        batch = consumer.claim(1)
        consumer.ack()
    return batch


def compare(
    report: Report, ours: Callable[[], None], others: dict[str, tuple[Callable[[], None], float | None]]
) -> None:
    figures = side_by_side(ROUNDS, lambda: wall(ours), *(lambda c=c: wall(c) for c, _ in others.values()))
    report.say("ours", sorted(figures[0])[ROUNDS // 2], "s")
    for (name, (_, least)), theirs in zip(others.items(), figures[1:], strict=True):
        report.say(f"{name}", sorted(theirs)[ROUNDS // 2], "s")
        report.say(f"{name} / ours", ratio(theirs, figures[0]), "x", least=least)


def whole(conninfo: str, branch: int, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "create table public.by_hand (carrier text, n bigint, delay bigint);"
            "create table public.by_batch (carrier text primary key, n bigint, delay bigint)"
        )
    airflow_home.prepare()
    environment = clean_environment() | {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),
        "AIRFLOW_CONN_HERE": airflow_home.uri(conninfo),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
    }
    with tempfile.TemporaryDirectory(prefix="pgchange-") as name:
        folder = Path(name)
        (folder / "by_hand.py").write_text(BY_HAND.format(driver=DRIVER, url=url(conninfo)))
        (folder / "ours.py").write_text(OURS)

        def start(*command: str) -> None:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(done.stdout[-3000:] + done.stderr[-3000:])

        def by_hand() -> float:
            confs = ("--conf", "spark.ui.enabled=false", "--jars", str(JDBC))
            return wall(
                lambda: start("spark-submit", "--master", "local[2]", *confs, str(folder / "by_hand.py"))
            )

        def ours(fast: bool) -> float:
            # Write another thousand changes. The measured seconds are those of the operator, without the start of
            # Airflow.
            with psycopg.connect(conninfo, autocommit=True) as connection:
                connection.execute(MOVEMENTS.format(1000))
            seconds = folder / "seconds"
            given = {
                "branch": branch,
                "application": str(folder / "ours.py"),
                "fast": fast,
                "seconds": str(seconds),
            }
            start(sys.executable, "-c", OPERATE, json.dumps(given))
            return float(seconds.read_text())

        ours(True)
        figures = side_by_side(ROUNDS, by_hand, lambda: ours(False), lambda: ours(True))
    for name, row in zip(
        ("a bare spark-submit with JDBC", "the operator", "the operator, fast_start"), figures, strict=True
    ):
        report.say(name, sorted(row)[ROUNDS // 2], "s")
    report.say("the operator / bare", ratio(figures[1], figures[0]), "x")
    report.say("the operator, fast_start / bare", ratio(figures[2], figures[0]), "x")
