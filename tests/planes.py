"""A tracked table of planes, and a Spark job that counts their seats, for the tests."""

from __future__ import annotations

from pyspark.sql import functions as f

from airflow_pgchange.feeds import CommitFeed
from tests.spark_session import track

PLANES = "create table plane (id bigint primary key, tail text, seats int, at timestamptz default now())"
COUNTS = "create table seats (kind text primary key, n bigint, total bigint)"


def make_planes(connection) -> CommitFeed:
    """Create planes 1 to 100, and return the feed of their changes."""
    connection.execute(PLANES)
    feed = track(connection, "plane")
    connection.execute("insert into plane select n, 'N' || n, n from generate_series(1, 100) n")
    return feed


def count_seats(job):
    """Add the planes of a batch, and their seats, to ``COUNTS``."""
    kind = f.concat(f.lit("mod "), f.col("seats") % 3).alias("kind")
    rows = job.rows("public.plane", key="id").groupBy(kind)
    figures = rows.agg(f.count("*").alias("n"), f.sum("seats").alias("total"))
    job.merge(figures, into="public.seats", key="kind", mode="add")
