"""Frames into tables of a lake: staged as files by the driver or by executors, committed with the progress."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import functions as f

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.feeds import CommitFeed, TubeFeed
from airflow_pgchange.lake import RemoteIceberg
from tests.lakes import HAS_SQL_CATALOG, PAYMENTS
from tests.spark_session import batch_of, track
from tests.tubes import attach, make

PAYMENT = "create table payment (id bigint generated always as identity primary key, account text, cents int)"


@pytest.fixture
def connection(connect):
    connection = connect()
    connection.execute(PAYMENT)
    return connection


@pytest.fixture
def feed(connection) -> CommitFeed:
    feed = track(connection, "payment")
    connection.execute(
        "insert into payment (account, cents) select 'a' || g % 3, g from generate_series(1, 30) as g"
    )
    return feed


def test_a_frame_is_appended_once_with_the_progress(feed, db, lake, path):
    lake.table()
    with pytest.raises(ZeroDivisionError), batch_of(feed, db) as job:
        job.merge(job.rows("payment", key="id"), into=lake.into, key=[], mode="append")
        raise ZeroDivisionError
    with batch_of(feed, db) as job:
        job.merge(job.rows("payment", key="id").repartition(3), into=lake.into, key=[], mode="append")
        assert lake.rows() == []
    assert [row["cents"] for row in lake.rows()] == list(range(1, 31))
    assert lake.batches() == [job.batch.id]


@pytest.mark.skipif(not HAS_SQL_CATALOG, reason="the REST catalog of the tests needs SQLAlchemy 2")
def test_a_frame_is_appended_to_a_table_of_another_catalog(feed, db, rest, path):
    rest.catalog.create_table("sales.payment", PAYMENTS)
    with batch_of(feed, db) as job:
        rows = job.rows("payment", key="id").repartition(3)
        job.merge(rows, into=RemoteIceberg("sales.payment", "rest"), key=[], mode="append")
    assert rest.catalog.load_table("sales.payment").scan().to_arrow().num_rows == 30


def test_a_mirror_follows_its_table(connection, db, lake, path):
    lake.table()
    make(connection, "copies")
    attach(connection, "payment", "copies")
    feed = TubeFeed("copies")
    connection.execute("insert into payment (cents) select generate_series(1, 30)")
    with batch_of(feed, db) as job:
        job.mirror("payment", lake.into, key="id")
    connection.execute("update payment set cents = 0 where id < 4; delete from payment where id = 5")
    with batch_of(feed, db) as job:
        job.merge(job.rows("payment", key="id"), into=lake.into, key="id", mode="mirror")
    expected = connection.execute("select id, cents from payment order by id").fetchall()
    assert [(row["id"], row["cents"]) for row in lake.rows()] == expected


def test_a_frame_that_does_not_fit_is_refused_before_a_file_is_written(feed, db, lake):
    lake.table()
    with batch_of(feed, db) as job:
        sums = job.rows("payment", key="id").groupBy("account").agg(f.sum("cents").alias("cents"))
        with pytest.raises(MergeRefused, match=r"lake\.sales\.payment: the rows do not fit the table"):
            job.merge(sums, into=lake.into, key="account", mode="replace")
    assert not list(lake.folder.rglob("*.parquet"))


def test_a_table_gets_the_columns_of_a_frame_that_may_add_them(feed, db, lake):
    lake.table()
    with batch_of(feed, db) as job:
        noted = job.rows("payment", key="id").withColumn("note", f.lit("n"))
        job.merge(noted, into=lake.into, key="id", mode="replace", evolve=True)
    assert {(row["account"], row["note"]) for row in lake.rows()} == {("a0", "n"), ("a1", "n"), ("a2", "n")}


TYPES = {
    "boolean": "true", "smallint": "-32768", "integer": "2147483647", "bigint": "-9223372036854775808",
    "real": "0.1", "double precision": "1e300", "numeric(38,10)": "'1234567890123456789012345678.0123456789'",
    "text": "E'é\\n'", "varchar(3)": "'abc'", "char(3)": "'a'", "name": "'n'", "bytea": r"'\x00ff'",
    "date": "'0044-03-15'",
    "timestamp": "'2013-01-01 00:00:00.000001'", "timestamptz": "'2013-07-01 05:17:00.5+02'",
    "uuid": "'c3b0a4ce-0000-4000-8000-000000000001'", "jsonb": """'{"a": [1]}'""", "json": "'[ 1]'", "inet": "'10.0.0.1'",
    "integer[]": "'{1,null}'", "text[]": "'{a}'", "time": "'05:17:00.000001'", "oid": "4294967295",
}  # fmt: skip
"""A value of each type of PostgreSQL that Spark reads."""


def test_values_of_every_type_that_spark_reads_arrive_as_spark_has_them(connection, db, lake, path):
    columns = {f"c{number}": kind for number, kind in enumerate(TYPES)}
    connection.execute(
        f"create table every (id bigint primary key, {', '.join(f'{n} {k}' for n, k in columns.items())})"
    )
    feed = track(connection, "every")
    connection.execute(
        f"insert into every values (1, {', '.join(TYPES.values())}), (2{', null' * len(TYPES)})"
    )
    with batch_of(feed, db) as job:
        rows = job.rows("every", key="id")
        table = rows.toArrow()
        fields = [
            field.with_type(pa.timestamp("us", "UTC")) if getattr(field.type, "tz", None) else field
            for field in table.schema
        ]
        lake.table(pa.schema(fields))
        job.merge(rows, into=lake.into, key=[], mode="append")
    assert lake.rows() == table.sort_by("id").to_pylist()
