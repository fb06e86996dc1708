"""Values that Spark or PostgreSQL cannot hold are refused with table, column and row, by the driver and by executors."""

from __future__ import annotations

import psycopg
import pytest
from pyspark.sql import functions as f

from airflow_pgchange.admin import schema
from airflow_pgchange.errors import UnsupportedType
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.feeds.batch import Partition
from airflow_pgchange.spark import adbc
from airflow_pgchange.spark.types import arrow_schema, describe, spark_schema
from airflow_pgchange.spark.unsupported_values import Rows
from tests.conftest import database
from tests.planes import make_planes
from tests.spark_session import batch_of, track
from tests.tubes import make


@pytest.fixture(scope="module")
def ascii_template(cluster):
    """The name of a database whose encoding accepts any bytes as text, for tests to copy.

    Installing our schemas takes longer.
    """
    name = "any_bytes"
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute(f"create database {name} template template0 encoding 'SQL_ASCII' locale 'C'")
        with psycopg.connect(cluster.conninfo(name), autocommit=True) as inside:
            schema.install(inside)
        yield name
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture
def ascii_db(cluster, ascii_template):
    """A database whose encoding accepts any bytes as text."""
    yield from database(cluster, ascii_template)


@pytest.mark.parametrize("kind", ["text", "list"])
def test_a_text_with_a_nul_names_table_column_and_row(db, connect, path, kind):
    """Takes seconds if this test starts the worker's Spark session."""
    connection = connect()
    feed = make_planes(connection)
    connection.execute("create table said (id bigint primary key, text text, list text[])")
    told = r'public\.said: column "%s" holds a text with a NUL character, .*a.x00b.*, where id is 77: take it out'
    with pytest.raises(Exception, match=told % kind), batch_of(feed, db) as job:
        text = f.when(f.col("id") == 77, f.lit("a\0b")).otherwise(f.lit("fine"))
        said = {"text": text, "list": f.array(f.lit("fine"), f.lit(None), text)}[kind].alias(kind)
        job.merge(
            job.rows("plane", key="id").select("id", said), into="public.said", key="id", mode="replace"
        )


def test_a_row_that_postgresql_refuses_names_the_table(db, connect, path):
    """Takes seconds if this test starts the worker's Spark session."""
    connection = connect()
    feed = make_planes(connection)
    names = [f"c{n}" for n in range(1100)]
    connection.execute(
        f"create table wide (id bigint primary key, {', '.join(f'{name} bigint' for name in names)})"
    )
    with pytest.raises(Exception, match=r"public\.wide: row is too big"), batch_of(feed, db) as job:
        frame = job.changes().select("id", *(f.lit(1).cast("bigint").alias(name) for name in names))
        job.merge(frame, into="public.wide", key="id", mode="replace")


def test_bytes_that_are_no_text_name_table_column_and_row(ascii_db, connect_to, path):
    """Takes seconds if this test starts the worker's Spark session."""
    connection = connect_to(ascii_db)
    connection.execute("create table said (id bigint primary key, word text, words text[])")
    feed = track(connection, "said")
    connection.execute("insert into said values (1, 'fine', '{fine}'), (2, null, null)")
    connection.execute("insert into said values (3, 'fine', array[convert_from('\\xe9ff', 'SQL_ASCII')])")
    told = (
        r'public.said: column "words" holds bytes that are no UTF-8, .*xe9.*, where id is 3: read it as bytea'
    )
    with pytest.raises(Exception, match=told), batch_of(feed, ascii_db) as job:
        job.rows("public.said", key="id").collect()
    with batch_of(feed, ascii_db) as job:
        assert job.rows("public.said", key="id", columns=["word"]).count() == 3


def test_bytes_that_are_no_text_name_the_change_that_a_function_is_not_handed(ascii_db, connect_to):
    connection = connect_to(ascii_db)
    make(connection)
    for id_, byte in ((5, "'a'"), (6, "'\\xe9'")):
        payload = f"to_jsonb(convert_from({byte}, 'SQL_ASCII'))"
        connection.execute(f"insert into q (op, shard, ids, payload) values ('T', 0, '{{{id_}}}', {payload})")
    told = "tube:q/0: the change after 5 has bytes that are not valid text .*0xe9"
    with pytest.raises(UnsupportedType, match=told), ConsumerTransaction(TubeFeed("q"), ascii_db) as consumer:
        assert consumer.claim(10) is not None
        list(consumer.changes())


def read(connection, db, query):
    columns = describe(connection, query)
    shape = arrow_schema(spark_schema(columns))
    return list(adbc.read(db, None, Partition(query, 1), columns, shape, rows=Rows("odd", ("id",))))


def test_a_misfit_names_a_column_whatever_its_name(db, connect):
    query = "select 7 as id, 'infinity'::date as \"a: b\", 'mine' as pgchange_misfit"
    with pytest.raises(UnsupportedType, match=r'odd: column "a: b" holds infinity, .*where id is 7:'):
        read(connect(), db, query)


def test_a_column_that_is_called_as_ours_is_read_beside_it(db, connect):
    (batch,) = read(connect(), db, "select 7 as id, '2024-01-01'::date as day, 'mine' as pgchange_misfit")
    assert batch.to_pylist()[0]["pgchange_misfit"] == "mine"
