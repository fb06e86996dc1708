"""A Spark job over a tube: the current rows of touched ids, the ids that are gone, and mirrors."""

from __future__ import annotations

import threading

import pytest
from pyspark.sql import functions as f

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.results.merge import merge
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.request import Work
from tests.commits import FEED as COMMITS
from tests.commits import commits
from tests.spark_session import batch_of, spark_session
from tests.tubes import attach, make, touch

FEED = TubeFeed("q")


@pytest.fixture
def planes(connect):
    connection = connect()
    connection.execute(
        "create table plane (id bigint primary key, tail text); create table mirror (id bigint primary key, tail text)"
    )
    make(connection)
    attach(connection, "plane")
    return connection


def same(connection, source="select * from plane", mirror="select * from mirror"):
    query = f"select count(*) from (({source} except {mirror}) union all ({mirror} except {source})) as d"
    return connection.execute(query).fetchone() == (0,)


def by_rows(job):
    job.merge(job.rows("plane", key="id"), into="mirror", key="id", mode="mirror")


def by_table(job):
    job.mirror("plane", "mirror", key="id")
    assert [staged.rows for staged in job.staged] == [job.changes().count()]


@pytest.mark.parametrize("mirror", [by_rows, by_table])
def test_a_mirror_follows_inserts_updates_deletes_and_changed_keys(db, planes, path, mirror):
    planes.execute("insert into plane select n, 'N' || n from generate_series(1, 50) as n")
    for change in (
        "select 1",
        "update plane set tail = 'new' where id <= 10",
        "delete from plane where id > 40",
        "update plane set id = id + 1000 where id = 20",
    ):
        planes.execute(change)
        with batch_of(FEED, db) as job:
            mirror(job)
        assert same(planes)


def test_a_mirror_follows_the_columns_of_its_table_and_a_merge_those_of_its_frame(db, planes, path):
    planes.execute("alter table plane add seats numeric(5,1); insert into plane values (1, 'a', 12.5)")
    with batch_of(FEED, db) as job:
        job.mirror("plane", "mirror", key="id", evolve=True)
    assert same(planes)
    planes.execute("alter table plane alter seats type numeric(6,1), add crew int; update plane set crew = 3")
    with batch_of(FEED, db) as job:
        job.merge(job.rows("plane", key="id"), into="mirror", key="id", mode="mirror", evolve=True)
    assert same(planes)
    assert planes.execute(
        "select format_type(atttypid, atttypmod) from pg_attribute where attrelid = 'mirror'::regclass and attnum > 2"
    ).fetchall() == [("numeric(6,1)",), ("integer",)]


def test_an_id_that_a_tables_mirror_cannot_hold_is_of_another_table(db, planes, path):
    planes.execute(
        "create table mirror_small (id smallint primary key, tail text); insert into mirror_small values (7, 'old');"
        "insert into plane values (1, 'a')"
    )
    touch(planes, 7, 70000)
    with batch_of(FEED, db) as job:
        job.mirror("plane", "mirror_small", key="id")
        assert sum(staged.rows for staged in job.staged) == 3
    assert same(planes, mirror="select id::bigint, tail from mirror_small")


def test_the_ids_that_no_longer_exist_are_told(db, planes, path):
    planes.execute("insert into plane values (1), (2); delete from plane where id = 2")
    with batch_of(FEED, db) as job:
        assert [row["id"] for row in job.rows("plane", key="id").collect()] == [1]
        assert [row["id"] for row in job.gone("plane", key="id").collect()] == [2]


@pytest.fixture
def shards(connect):
    """Two tables of the same name and with the same ids, in two schemas."""
    connection = connect()
    make(connection)
    for name in ("sh0001", "sh0002"):
        connection.execute(
            f"create schema {name}; create table {name}.plane (id bigint primary key, tail text)"
        )
        attach(connection, f"{name}.plane", shard=None)
        connection.execute(f"insert into {name}.plane select n, '{name}' from generate_series(1, 9) as n")
    connection.execute("create table mirror (shard int, id bigint, tail text, primary key (shard, id))")
    return connection


def mirror_shards(job):
    frames = [
        job.rows(f"sh{shard:04}.plane", key="id", shard=shard).withColumn("shard", f.lit(shard))
        for shard in job.shards()
    ]
    frame = frames[0]
    for other in frames[1:]:
        frame = frame.unionByName(other)
    job.merge(frame, into="mirror", key=["shard", "id"], mode="mirror")


def test_one_mirror_holds_several_shards_whose_ids_are_the_same(db, shards, path):
    both = " union all ".join(f"select {n}, id, tail from sh000{n}.plane" for n in (1, 2))
    with batch_of(FEED, db) as job:
        mirror_shards(job)
    assert same(shards, f"({both})")
    shards.execute("delete from sh0001.plane where id = 3; update sh0002.plane set tail = 'x' where id = 4")
    with batch_of(FEED, db) as job:
        mirror_shards(job)
    assert same(shards, f"({both})")
    assert shards.execute("select count(*) from mirror").fetchone() == (17,)


def test_a_mirror_of_one_shard_leaves_the_others_rows_alone(db, shards, path):
    shards.execute(
        "create table first (id bigint primary key, tail text); insert into first values (100, 'mine');"
        "insert into sh0002.plane values (100, 'sh0002')"
    )
    with batch_of(FEED, db) as job:
        job.merge(job.rows("sh0001.plane", key="id", shard=1), into="first", key="id", mode="mirror", shard=1)
    assert same(shards, "(select * from sh0001.plane union all select 100, 'mine')", "select * from first")


def test_a_key_that_the_changes_do_not_have_is_refused(db, planes):
    planes.execute(
        "insert into plane values (1); create table other (tail text, id bigint, primary key (tail, id))"
    )
    with batch_of(FEED, db) as job:
        rows = job.rows("plane", key="id")
        with pytest.raises(MergeRefused, match='"tail" of the key is no column of this feed'):
            job.merge(rows, into="other", key=["tail", "id"], mode="mirror")


def test_a_feed_without_shards_says_so(db, connect):
    commits(connect(), 1)
    with batch_of(COMMITS, db) as job:
        assert job.shards() == []
        with pytest.raises((InvalidArgument, Exception), match="no shards"):
            job.changes(shard=1).collect()


@pytest.fixture
def two_keys(connect):
    """Two tables under one shard whose ids have different integer types, and their copies."""
    connection = connect()
    connection.execute("create schema copies")
    make(connection)
    for name, key in (("large", "bigint"), ("small", "int")):
        connection.execute(
            f"create table {name} (id {key} primary key); create table copies.{name} (like {name} including all)"
        )
        attach(connection, name)
    return connection


def test_tables_of_one_shard_may_have_ids_of_two_sizes(db, two_keys, path):
    """Takes seconds if this test starts the worker's Spark session."""
    two_keys.execute("insert into large values (5000000000), (1); insert into small values (1), (2)")
    with batch_of(FEED, db) as job:
        for attached in job.attached():
            job.mirror(attached, into="copies.{table}")
    assert same(two_keys, "select * from large", "select * from copies.large")
    assert same(two_keys, "select * from small", "select * from copies.small")


def test_generated_columns_of_a_copy_are_left_to_it(db, connect, path):
    connection = connect()
    connection.execute(
        "create table part (id bigint generated always as identity primary key, n int, "
        "twice int generated always as (n * 2) stored); "
        "create table copy (like part including all); insert into part (n) values (1), (2)"
    )
    make(connection)
    attach(connection, "part")
    connection.execute("update part set n = 5")
    with batch_of(FEED, db) as job:
        (attached,) = job.attached()
        job.mirror(attached, into="public.copy")
    assert same(connection, "select id, n, twice from part", "select id, n, twice from copy")


@pytest.mark.parametrize("given", [{"key": "n"}, {"shard": 3}])
def test_an_attached_tables_mirror_has_the_key_and_the_shard_of_the_table(db, planes, given):
    planes.execute("insert into plane values (1, 'a')")
    with batch_of(FEED, db) as job:
        (attached,) = job.attached()
        with pytest.raises(InvalidArgument, match="leave them out"):
            job.mirror(attached, "public.mirror", **given)


def test_a_standby_that_lags_is_asked_when_it_knows_of_the_batch(own_cluster, own_database, connect_to):
    """The first batch comes from a table that was just attached, the second has a column that was just added."""
    connection = connect_to(own_database)
    make(connection)
    connection.execute(
        "create table plane (id bigint primary key); create table mirror (id bigint primary key, n int)"
    )
    standby = own_cluster.standby()
    try:
        replica = connect_to(standby.conninfo())
        for late in (
            lambda: (attach(connection, "plane"), connection.execute("insert into plane values (1)")),
            lambda: connection.execute("alter table plane add n int; insert into plane values (2, 7)"),
        ):
            standby.wait_for_replay(own_cluster)
            replica.execute("select pg_wal_replay_pause()")
            late()
            with ConsumerTransaction(FEED, own_database, own_database) as consumer:
                batch = consumer.claim(10)
                assert batch is not None
                catching_up = threading.Timer(1, replica.execute, ["select pg_wal_replay_resume()"])
                catching_up.start()
                request = Work(FEED, batch, own_database, standby.conninfo())
                job = Job(spark_session(), request)
                for attached in job.attached():
                    job.mirror(attached, into="public.mirror")
                catching_up.join()
                consumer.ack(lambda results, batch=batch, job=job: merge(results, batch, job.staged))
            (columns,) = connection.execute(
                "select string_agg(attname, ', ') from pg_attribute "
                "where attrelid = 'plane'::regclass and attnum > 0"
            ).fetchone()
            assert same(connection, f"select {columns} from plane", f"select {columns} from mirror")
    finally:
        standby.remove()
