"""Every type from PostgreSQL to Spark and back: its values are exact, or refused with the column's name."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal

import pytest
from pyspark.sql.functions import date_format

from airflow_pgchange.errors import UnsupportedType
from airflow_pgchange.feeds.reading import Partition
from airflow_pgchange.spark import adbc
from airflow_pgchange.spark.types import PINNED, arrow_schema, describe, spark_schema
from airflow_pgchange.spark.unsupported_values import Rows
from tests.every_type import differences, fill, make_tables
from tests.sessions import SPEAKING
from tests.spark_session import batch_of, track
from tests.suite.clusters import new_cluster


@pytest.fixture
def typed(connect):
    """A table with a column of every type that the server knows, and these: a row of NULLs, and a row for each value."""
    connection = connect()
    known = make_tables(connection)
    feed = track(connection, "typed")
    fill(connection, known)
    return connection, feed, known


def test_every_type_survives_the_way_to_spark_and_back(db, typed, path):
    connection, feed, known = typed
    with batch_of(feed, db) as job:
        rows = job.rows("public.typed", key="id").dropDuplicates(["id"])
        assert dict(rows.dtypes) == {"id": "bigint"} | {name: kind for name, (_, kind, _) in known.items()}
        job.merge(rows, into="public.copied", key="id", mode="replace")
    assert connection.execute("select count(*) from copied").fetchone() == (6,)
    assert differences(connection, known) == []


def test_spark_sees_the_values_that_postgresql_holds(db, connect, path):
    connection = connect()
    connection.execute(
        "create table seen (id bigint primary key, n numeric(10,2), f float8, at timestamptz, clock timestamp, "
        "day date, l text[], b bytea, j jsonb)"
    )
    feed = track(connection, "seen")
    connection.execute(
        "insert into seen values (1, 1.50, 'NaN', '2024-07-01 12:00:00+00', '2024-07-01 12:00:00', '2024-07-01', "
        """'{a,NULL}', '\\x00ff', '{"a": 1}')"""
    )
    with batch_of(feed, db) as job:
        (row,) = (
            job.rows("public.seen", key="id")
            .withColumn("shown", date_format("at", "yyyy-MM-dd HH:mm"))
            .collect()
        )
    assert row["n"] == Decimal("1.50")
    assert math.isnan(row["f"])
    assert row["shown"] == "2024-07-01 08:00"
    assert row["clock"] == dt.datetime(2024, 7, 1, 12)
    assert row["day"] == dt.date(2024, 7, 1)
    assert row["l"] == ["a", None]
    assert bytes(row["b"]) == b"\x00\xff"
    assert row["j"] == '{"a": 1}'


MISFITS = {
    "timestamp infinity": ("'infinity'::timestamp", "infinity"),
    "timestamp -infinity": ("'-infinity'::timestamp", "infinity"),
    "timestamptz infinity": ("'infinity'::timestamptz", "infinity"),
    "date infinity": ("'infinity'::date", "infinity"),
    "date -infinity": ("'-infinity'::date", "infinity"),
    "after the last microsecond": ("'294276-12-31'::timestamp", "a time after 294247"),
    "numeric NaN": ("'NaN'::numeric", "NaN"),
    "numeric(10,2) NaN": ("'NaN'::numeric(10,2)", "NaN"),
    "numeric infinity": ("'Infinity'::numeric", "Infinity"),
    "too many places": ("0.0000000000000000001::numeric", "outside the range of its type"),
    "too many digits": ("123456789012345678901::numeric", "outside the range of its type"),
    "array of arrays": ("'{{1,2},{3,4}}'::int[]", "several dimensions"),
    "array from 0": ("'[0:1]={1,2}'::int[]", "first index is not 1"),
    "infinity in an array": ("'{infinity}'::timestamptz[]", "infinity"),
    "NaN in an array": ("'{NaN}'::numeric[]", "NaN"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_value_without_a_counterpart_is_refused_by_the_name_of_its_column(shared_db, shared, case):
    value, problem = MISFITS[case]
    query = f"select n as id, case when n = 3 then {value} end as odd_one from generate_series(1, 5) n"
    with pytest.raises(
        UnsupportedType,
        match=f'^odd: column "odd_one" .*{problem}.*, where id is 3: cast the column to text in a view',
    ):
        read(shared_db, shared, query, 5)


def test_a_type_without_a_counterpart_is_refused_by_the_name_of_its_column(connect):
    with pytest.raises(UnsupportedType, match=r'"amount" is numeric\(50,2\)'):
        describe(connect(), "select 1::numeric(50,2) as amount")


def test_a_misfit_that_an_executor_finds_names_its_column(db, connect, monkeypatch):
    """Takes seconds if this test starts the worker's Spark session."""
    monkeypatch.setattr("airflow_pgchange.spark.job.SMALL", 0)
    connection = connect()
    connection.execute("create table odd (id bigint primary key, at timestamptz)")
    feed = track(connection, "odd")
    connection.execute("insert into odd values (1, 'infinity')")
    with pytest.raises(Exception, match='column "at" holds infinity'), batch_of(feed, db) as job:
        job.rows("public.odd", key="id").collect()


def test_a_column_that_cannot_be_read_can_be_left_out(db, connect, path):
    """Takes seconds if this test starts the worker's Spark session."""
    connection = connect()
    connection.execute("create table odd (id bigint primary key, n numeric(60), word text)")
    feed = track(connection, "odd")
    connection.execute("insert into odd values (1, 1, 'fine')")
    with batch_of(feed, db) as job:
        with pytest.raises(Exception, match=r'column "n" is numeric\(60,0\)'):
            job.rows("public.odd", key="id").collect()
        assert [tuple(row) for row in job.rows("public.odd", key="id", columns=["word"]).collect()] == [
            (1, "fine")
        ]


def test_types_of_extensions_are_read_as_text(contrib, connect_to):
    connection = connect_to(contrib)
    connection.execute("create extension citext; create extension hstore; create extension ltree")
    query = "select 'Ab'::citext as c, 'a=>1'::hstore as h, 'a.b'::ltree as l, array['Ab'::citext] as cs"
    assert read(contrib, connection, query, 1) == [{"c": "Ab", "h": '"a"=>"1"', "l": "a.b", "cs": ["Ab"]}]


def test_a_view_says_the_same_to_every_reading_session(db, connect):
    connection = connect()
    name = connection.info.dbname
    for setting in SPEAKING:
        connection.execute(f'alter database "{name}" set {setting}')
    shown = ", ".join(
        f"{condition.format('t.note')} as c{place}" for place, condition in enumerate(SPEAKING.values())
    )
    connection.execute(f"create view said as select {shown} from (values ('running')) as t(note)")
    (row,) = read(db, connection, "select * from said", 1)
    assert dict(zip(SPEAKING, row.values(), strict=True)) == dict.fromkeys(SPEAKING, True)


def test_a_reading_session_has_the_settings_of_all_others(shared):
    pinned = dict(shared.execute("select name, value from pgchange.pinned_settings()").fetchall())
    assert pinned.keys() - PINNED.keys() == {"row_security", "default_text_search_config"}
    assert PINNED.items() <= pinned.items()


@pytest.fixture
def contrib():
    """A server on which PostgreSQL's contrib extensions are installed."""
    cluster = new_cluster("system")
    yield cluster.conninfo()
    cluster.remove()


def read(db, connection, query, count):
    columns = describe(connection, query)
    schema = arrow_schema(spark_schema(columns))
    return [
        row
        for batch in adbc.read(db, None, Partition(query, count), columns, schema, rows=Rows("odd", ("id",)))
        for row in batch.to_pylist()
    ]
