"""A Spark job with a failing task, attempt or standby, or with results that do not fit."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import functions as f

from airflow_pgchange.admin import schema
from airflow_pgchange.errors import BatchIncomplete, MergeRefused, ServerUnavailable
from airflow_pgchange.feeds import ConsumerTransaction
from airflow_pgchange.feeds.batch import Partition
from airflow_pgchange.feeds.connections import connect as feed_connect
from airflow_pgchange.feeds.feed import partitions
from airflow_pgchange.spark import adbc, table_sink
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.types import arrow_schema, describe, spark_schema
from airflow_pgchange.spark.unsupported_values import Rows
from tests.planes import COUNTS, PLANES, count_seats, make_planes
from tests.spark_session import batch_of, track
from tests.waiting import sleeps, until

PLANE = Rows("plane", ("id",))


@pytest.fixture
def planes(connect):
    """A tracked table of planes and the feed of its changes."""
    connection = connect()
    return connection, make_planes(connection)


def counted_wrong(batch):
    """Return the batch with a count that is one too high, as if the claim had counted a change that nobody can read."""
    first, *others = batch.slices
    more = dataclasses.replace(first, count=first.count + 1)
    return dataclasses.replace(batch, count=batch.count + 1, slices=(more, *others))


def test_a_batch_that_is_read_short_fails_where_it_is_read(db, planes, path):
    _, feed = planes
    short = "a partition of the batch has 101 changes, its reader found 100"
    with pytest.raises(Exception, match=short), batch_of(feed, db) as job:
        request = dataclasses.replace(job._work, batch=counted_wrong(job.batch))
        Job(job.spark, request).rows("public.plane", key="id").collect()


def test_a_misfit_is_refused_before_anything_is_read_or_staged(db, planes, executors):
    connection, feed = planes
    connection.execute(COUNTS)
    with ConsumerTransaction(feed, db):
        pass
    with pytest.raises(MergeRefused, match='no column "color"'), batch_of(feed, db) as job:
        never = job.spark.range(10).select(f.raise_error(f.lit("was read")).cast("string").alias("color"))
        job.merge(never, into="public.seats", key=[], mode="append")
    assert connection.execute("select from pgchange.staged_tables()").fetchall() == []


def test_a_task_that_failed_after_it_had_staged_leaves_no_doubled_rows(db, planes, executors, monkeypatch):
    connection, feed = planes
    connection.execute("create table log (tail text)")
    writer = table_sink._writer

    def failing(*arguments):
        write = writer(*arguments)

        def write_and_fail(batches):
            yield from write(batches)
            if TaskContext.get().attemptNumber() == 0:
                raise RuntimeError("failed after its commit")

        return write_and_fail

    monkeypatch.setattr(table_sink, "_writer", failing)
    with batch_of(feed, db) as job:
        job.merge(
            job.rows("public.plane", key="id", columns=["tail"]).select("tail"),
            into="public.log",
            key=[],
            mode="append",
        )
        (staged,) = job.staged
        there = connection.execute(f"select count(*) from pgchange_staging.{staged.table}").fetchone()
        assert there == (200,), "the fault did not fire"
    assert connection.execute("select count(*), count(distinct tail) from log").fetchone() == (100, 100)


def test_results_of_a_rolled_back_attempt_are_not_seen_by_the_next(db, planes, path):
    """Takes seconds if this test starts the worker's Spark session."""
    connection, feed = planes
    connection.execute(COUNTS)

    class Failed(Exception):
        pass

    with pytest.raises(Failed), batch_of(feed, db) as job:
        count_seats(job)
        raise Failed
    with batch_of(feed, db) as job:
        assert job.batch.attempt == 2
        count_seats(job)
    assert connection.execute("select sum(n) from seats").fetchone() == (100,)


def columns_of(conninfo, query):
    with feed_connect(conninfo) as connection:
        columns = describe(connection, query)
    return columns, arrow_schema(spark_schema(columns))


def test_a_reader_on_a_standby_waits_until_it_can_read_the_batch(own_cluster, connect_to):
    """Takes seconds: a standby is made, and lags."""
    primary = connect_to(own_cluster.conninfo())
    schema.install(primary)
    primary.execute(PLANES)
    feed = track(primary, "plane")
    standby = own_cluster.standby()
    try:
        standby.wait_for_replay(own_cluster)
        replica = connect_to(standby.conninfo())
        replica.execute("select pg_wal_replay_pause()")
        primary.execute("insert into plane select n, 'N' || n, n from generate_series(1, 100) n")
        with ConsumerTransaction(feed, own_cluster.conninfo()) as consumer:
            batch = consumer.claim(100)
            (partition,) = partitions(feed, batch, 1)
            assert replica.execute(f"select count(*) from ({partition.query}) q").fetchone() == (0,)
            columns, read_schema = columns_of(standby.conninfo(), partition.query)
            resume = threading.Timer(0.5, replica.execute, ["select pg_wal_replay_resume()"])
            resume.start()
            batches = list(
                adbc.read(standby.conninfo(), batch.lsn, partition, columns, read_schema, rows=PLANE)
            )
            resume.join()
            consumer.ack()
        assert sum(batch.num_rows for batch in batches) == 100
    finally:
        standby.remove()


def test_a_query_that_a_standby_cancels_is_read_again(own_cluster, connect_to):
    """Takes seconds: a standby is made, and cancels a query only after its grace."""
    primary = connect_to(own_cluster.conninfo())
    primary.execute("create table plane (id bigint primary key, word text)")
    primary.execute("insert into plane select n, 'old' from generate_series(1, 1000) n")
    standby = own_cluster.standby({"max_standby_streaming_delay": "10ms", "hot_standby_feedback": "off"})
    try:
        standby.wait_for_replay(own_cluster)
        query = "select id, word, pg_sleep(0.002)::text as slept from plane order by id"
        columns, read_schema = columns_of(standby.conninfo(), query)
        read = []
        reader = threading.Thread(
            target=lambda: read.extend(
                adbc.read(standby.conninfo(), None, Partition(query, 1000), columns, read_schema, rows=PLANE)
            )
        )
        reader.start()
        replica = connect_to(standby.conninfo())
        until(replica, sleeps())
        primary.execute("update plane set word = 'new'")
        primary.execute("vacuum plane")
        reader.join()
        # PostgreSQL reports the cancelled session only when it has ended.
        until(
            replica,
            "select sum(confl_snapshot + confl_lock + confl_bufferpin) > 0 from pg_stat_database_conflicts",
        )
        words = [word for batch in read for word in batch.column("word").to_pylist()]
        assert Counter(words) == {"new": 1000}
    finally:
        standby.remove()


def test_a_query_that_a_standby_always_cancels_ends_with_advice(monkeypatch):
    tried = []

    def cancelled(server, query):
        tried.append(query)
        raise OSError("canceling statement due to conflict with recovery")
        yield pa.RecordBatch.from_pydict({})

    monkeypatch.setattr(adbc, "_stream", cancelled)
    monkeypatch.setattr(adbc.time, "sleep", lambda seconds: None)
    with pytest.raises(BatchIncomplete, match="hot_standby_feedback"):
        adbc._read_whole("", "select 1")
    assert len(tried) == adbc.STANDBY_TRIES


def test_a_password_is_not_repeated_in_the_error(own_cluster):
    secret = "hunter2-of-the-airline"
    with pytest.raises(ServerUnavailable, match="nowhere") as caught:
        columns_of(f"{own_cluster.conninfo()} password={secret} dbname=nowhere", "select 1 as a")
    assert secret not in str(caught.value)
