"""A Spark session and batches for tests that need no operator."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from pyspark.sql import SparkSession

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.results.merge import merge
from airflow_pgchange.spark import submit
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.request import Work
from airflow_pgchange.topology.bucket_owners import Cluster
from tests.quick_spark import DAEMON, QUICK
from tests.spark_daemon import PACKAGE

ZONE = "America/New_York"
"""A session time zone that is not UTC, so that a test notices a time that is read or written in the wrong zone."""


@functools.cache
def spark_session() -> SparkSession:
    """Return the session that all tests of a process share.

    Executors get the package from the zip, as in production. Spark's environment variables are set only while the
    session is created, so that other tests do not see them.
    """
    package = submit.py_files()
    builder = SparkSession.builder.master("local[2,3]").appName("tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.sql.session.timeZone": ZONE,
        "spark.sql.warehouse.dir": "/nonexistent",
        "spark.submit.pyFiles": package,
        **QUICK,
        **DAEMON,
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    environment = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, PACKAGE: package}
    with patch.dict(os.environ, environment):
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def track(connection, table: str, consumer: str = "test") -> CommitFeed:
    """Track a table, and return the feed of its changes."""
    branch = connection.execute("select revision.track(%s::text::regclass)", [table]).fetchone()[0]
    return CommitFeed(consumer, branch)


@contextmanager
def batch_of(
    feed: Feed,
    results: str,
    source: str | None = None,
    *,
    limit: int = 1_000_000,
    cluster: Cluster | None = None,
) -> Iterator[Job]:
    """Claim the next batch, and yield a job with it.

    At the end, merge what the job staged and ack, as the operator does.
    """
    with ConsumerTransaction(feed, results, source) as consumer:
        batch = consumer.claim(limit)
        assert batch is not None
        request = Work(feed, batch, results, source or results, cluster)
        job = Job(spark_session(), request)
        yield job
        consumer.ack(lambda connection: merge(connection, batch, job.staged))
