"""Any name that PostgreSQL takes is read, staged and merged, by the driver and by executors, in every mode."""

from __future__ import annotations

import json

import pytest
from psycopg import sql
from pyspark.sql import functions as f

from airflow_pgchange.errors import UnsupportedType
from airflow_pgchange.events import Event, publish, subscribe, topical
from airflow_pgchange.feeds import CommitFeed, EventFeed, TubeFeed
from tests.hard_names import HARD
from tests.spark_session import batch_of, track
from tests.tubes import attach, make

KEY, TABLE, COPY = 'k`e.y "{}" %s', 'fr`om "this". {} %s', "in`to.{} 'that' \\"
QUOTED = sql.Identifier(TABLE), sql.Identifier(COPY)


def written(name):
    """A name with dots and quotes, as users write it."""
    return 'public."' + name.replace('"', '""') + '"'


@pytest.fixture
def named(connect):
    """A tracked table whose columns have all these names, its empty copy, and the feed."""
    connection = connect()
    columns = sql.SQL(", ").join(sql.SQL("{} bigint").format(sql.Identifier(name)) for name in HARD)
    for table in QUOTED:
        connection.execute(
            sql.SQL("create table {} ({} bigint primary key, {})").format(table, sql.Identifier(KEY), columns)
        )
    return connection


def fill(connection):
    values = sql.SQL(", ").join(sql.SQL("n * {}").format(place) for place in range(2, len(HARD) + 2))
    connection.execute(
        sql.SQL("insert into {} select n, {} from generate_series(1, 3) n").format(QUOTED[0], values)
    )


def same(connection):
    source, copy = QUOTED
    query = sql.SQL(
        "select (select count(*) from {1}), count(*) from (select * from {0} except select * from {1}) d"
    )
    return connection.execute(query.format(source, copy)).fetchone() == (3, 0)


def commit_feed(connection):
    track = sql.SQL("select revision.track({})").format(QUOTED[0].as_string(connection))
    branch = connection.execute(track).fetchone()[0]
    fill(connection)
    return CommitFeed("named", branch)


@pytest.mark.parametrize("mode", ["add", "replace", "mirror", "append"])
def test_columns_and_tables_of_any_name_are_read_and_merged(db, named, path, mode):
    """Takes seconds if this test starts the worker's Spark session."""
    feed = commit_feed(named)
    with batch_of(feed, db) as job:
        rows = job.rows(written(TABLE), key=KEY)
        assert rows.columns == [KEY, *HARD]
        job.merge(rows, into=written(COPY), key=KEY, mode=mode)
    assert same(named)


def test_columns_of_any_name_are_chosen_by_it(db, named, path):
    """Takes seconds if this test starts the worker's Spark session."""
    feed = commit_feed(named)
    with batch_of(feed, db) as job:
        chosen = job.rows(written(TABLE), key=KEY, columns=HARD)
        assert chosen.columns == [KEY, *HARD]
        assert sorted(tuple(row) for row in chosen.collect())[1] == (
            2,
            *(2 * n for n in range(2, len(HARD) + 2)),
        )
        assert job.gone(written(TABLE), key=KEY).count() == 0


def test_an_attached_table_of_any_name_is_mirrored(db, named, path):
    """Takes seconds if this test starts the worker's Spark session."""
    make(named)
    attach(named, sql.Identifier("public", TABLE).as_string(named), key=[KEY])
    fill(named)
    with batch_of(TubeFeed("q"), db) as job:
        (attached,) = job.attached()
        job.mirror(attached, into=written(COPY).replace("{", "{{").replace("}", "}}"))
    assert same(named)


def test_fields_of_any_name_are_columns_of_payloads(db, connect, path):
    connection = connect()
    subscribe(connection, "g", topical("named"))
    publish(connection, [Event("named", {name: place for place, name in enumerate(HARD)})])
    schema = ", ".join(f"`{name.replace('`', '``')}` bigint" for name in HARD)
    with batch_of(EventFeed("g"), db) as job:
        frame = job.payloads(schema)
        assert frame.columns[2:] == HARD
        assert list(frame.collect()[0])[2:] == list(range(len(HARD)))
        assert json.loads(job.changes().collect()[0]["payload"])["a`b"] == 0


def test_names_that_differ_by_case_alone_are_refused_wherever_they_are(db, connect, path):
    connection = connect()
    connection.execute('create table twins (id bigint primary key, "Name" int, name int)')
    feed = track(connection, "twins")
    connection.execute("insert into twins values (1, 2, 3)")
    with batch_of(feed, db) as job:
        with pytest.raises(Exception, match='"name" come twice'):
            job.rows("twins", key="id").collect()
        assert job.rows("twins", key="id", columns=["Name"]).columns == ["id", "Name"]
        frame = job.changes().select("id", f.lit(1).alias("n"), f.lit(1).alias("N"))
        with pytest.raises(UnsupportedType, match='"n" come twice'):
            job.merge(frame, into="twins", key="id", mode="replace")
