"""Every type there and back: PostgreSQL to Spark to PostgreSQL, exactly, or refused by name."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal

import psycopg
import pytest
from pyspark.sql.functions import date_format
from pyspark.sql.pandas.types import to_arrow_schema

from airflow_pgchange.feeds.errors import UnsupportedType
from airflow_pgchange.feeds.reading import Partition
from airflow_pgchange.spark import arrow
from airflow_pgchange.spark.misfits import Rows
from airflow_pgchange.spark.types import describe, spark_schema
from tests.spark_session import batch_of, track
from tests.suite.clusters import new_cluster

DDL = """
create type mood as enum ('sad', 'happy');
create type pair as (x int, y text);
create domain positive as int check (value > 0);
create domain price as numeric(10, 2);
create domain numbers as int[];
"""
COLUMNS = {
    "flag": ("boolean", "boolean", ["true", "false"]),
    "small": ("smallint", "smallint", ["-32768", "32767"]),
    "medium": ("integer", "int", ["-2147483648", "2147483647"]),
    "large": ("bigint", "bigint", ["-9223372036854775808", "9223372036854775807"]),
    "single": ("real", "float", ["1.5", "'NaN'", "'-Infinity'", "3.4e38"]),
    "double": ("double precision", "double", ["0.1", "'NaN'", "'Infinity'", "1.7976931348623157e308", "5e-324"]),
    "amount": ("numeric(10,2)", "decimal(10,2)", ["0.01", "-99999999.99", "1.50"]),
    "hundreds": ("numeric(3,-2)", "decimal(5,0)", ["99900", "-100"]),
    "tiny": ("numeric(2,4)", "decimal(4,4)", ["0.0099", "-0.0001"]),
    "huge": ("numeric(38,0)", "decimal(38,0)", ["9" * 38, "-" + "9" * 38]),
    "free": ("numeric", "decimal(38,18)", ["12345678901234567890.123456789012345678", "-0.000000000000000001", "1e19"]),
    "cash": ("money", "decimal(38,18)", ["'92233720368547758.07'", "'-1.01'"]),
    "word": ("text", "string", ["'é 日本 😀'", "''", "E'\\t\\n\\\\'"]),
    "brief": ("varchar(5)", "string", ["'ab '"]),
    "padded": ("char(5)", "string", ["'ab'"]),
    "called": ("name", "string", ["'somebody'"]),
    "letter": ('"char"', "string", ["'x'"]),
    "mood": ("mood", "string", ["'sad'", "'happy'"]),
    "positive": ("positive", "int", ["1"]),
    "price": ("price", "decimal(10,2)", ["9.99"]),
    "bytes": ("bytea", "binary", ["'\\x00ff'", "''"]),
    "day": ("date", "date", ["'0001-01-01'", "'9999-12-31'", "'1582-10-10'", "'2000-02-29'", "'4713-01-01 BC'"]),
    "clock": ("timestamp", "timestamp_ntz", ["'0001-01-01 00:00:00'", "'2024-03-10 02:30:00.123456'",
              "'9999-12-31 23:59:59.999999'", "'4713-01-01 00:00:00 BC'", "'294246-12-31 23:59:59.999999'"]),
    "instant": ("timestamptz", "timestamp", ["'1883-11-18 12:00:00-05'", "'2024-11-03 01:30:00-04'",
                "'2024-11-03 01:30:00-05'", "'9999-12-31 23:59:59.999999+00'", "'4713-01-02 00:00:00+00 BC'"]),
    "at": ("time", "string", ["'24:00:00'", "'00:00:00.000001'"]),
    "at_zone": ("timetz", "string", ["'12:00:00-07'"]),
    "span": ("interval", "string", ["'1 year 2 mons -3 days 04:05:06.000007'"]),
    "id_": ("uuid", "string", ["'c3b0a4ce-0000-4000-8000-000000000001'"]),
    "doc": ("json", "string", ["""'{"b": 1,  "a": 1e400}'"""]),
    "docb": ("jsonb", "string", ["""'{"a": [1, null, "x"]}'"""]),
    "page": ("xml", "string", ["'<a>1</a>'"]),
    "object": ("oid", "bigint", ["4294967295"]),
    "host": ("inet", "string", ["'10.0.0.1/24'"]),
    "place": ("point", "string", ["'(1.5,-2)'"]),
    "bits": ("bit varying", "string", ["B'101'"]),
    "words": ("tsvector", "string", ["'fat cat'"]),
    "numbers_": ("int4range", "string", ["'[1,5)'", "'empty'", "'(,)'"]),
    "period": ("tstzrange", "string", ["'[2024-03-10 02:30:00-05,infinity)'"]),
    "periods": ("int4multirange", "string", ["'{[1,2),[5,8)}'"]),
    "pair": ("pair", "string", ["row(1, 'a,\"b')"]),
    "vector": ("int2vector", "string", ["'1 2 3'", "''"]),
    "oids": ("oidvector", "string", ["'4294967295 1'"]),
    "vectors": ("int2vector[]", "array<string>", ["array['1 2'::int2vector]"]),
    "ints": ("int[]", "array<int>", ["'{1,NULL,3}'", "'{}'"]),
    "longs": ("bigint[]", "array<bigint>", ["'{9223372036854775807}'"]),
    "flags": ("boolean[]", "array<boolean>", ["'{t,f,NULL}'"]),
    "texts": ("text[]", "array<string>", ["""'{a,"",NULL,"x,y","NULL"}'"""]),
    "chars": ("char(3)[]", "array<string>", ["'{a}'"]),
    "amounts": ("numeric(10,2)[]", "array<decimal(10,2)>", ["'{1.50,NULL}'"]),
    "moneys": ("money[]", "array<decimal(38,18)>", ["'{1.50,-2}'"]),
    "doubles": ("float8[]", "array<double>", ["'{0.1,NaN,-Infinity}'"]),
    "days": ("date[]", "array<date>", ["'{2024-02-29,NULL}'"]),
    "instants": ("timestamptz[]", "array<timestamp>", ["'{2024-11-03 01:30:00-05}'"]),
    "blobs": ("bytea[]", "array<binary>", ["array['\\x00ff'::bytea]"]),
    "ids": ("uuid[]", "array<string>", ["'{c3b0a4ce-0000-4000-8000-000000000001}'"]),
    "docs": ("jsonb[]", "array<string>", ["""array['{"a": 1}'::jsonb]"""]),
    "moods": ("mood[]", "array<string>", ["'{sad,happy}'"]),
    "positives": ("positive[]", "array<int>", ["'{1,2}'"]),
    "numbers": ("numbers", "array<int>", ["'{1,2}'"]),
    "pairs": ("pair[]", "array<string>", ["array[row(1, 'a')::pair]"]),
}  # fmt: skip


def columns_of(connection):
    """What this server knows: not each is built with xml."""
    try:
        connection.execute("select '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:
        return {name: column for name, column in COLUMNS.items() if column[0] != "xml"}
    return COLUMNS


@pytest.fixture
def typed(connect):
    """A table with a column of every type that the server knows, and these: a row of NULLs, and a row for each value."""
    connection = connect()
    known = columns_of(connection)
    connection.execute(DDL)
    connection.execute("set datestyle = 'SQL, DMY'; set timezone = 'Asia/Tokyo'")
    columns = ", ".join(f'"{name}" {kind}' for name, (kind, _, _) in known.items())
    for table in ("typed", "copied"):
        connection.execute(f"create table {table} (id bigint primary key, {columns})")
    feed = track(connection, "typed")
    connection.execute("insert into typed (id) values (0)")
    for name, (_, _, values) in known.items():
        for number, value in enumerate(values, 1):
            connection.execute(
                f'insert into typed (id, "{name}") values ({number}, {value}) '
                f'on conflict (id) do update set "{name}" = excluded."{name}"'
            )
    return connection, feed, known


def test_every_type_survives_the_way_to_spark_and_back(db, typed, path):
    connection, feed, known = typed
    with batch_of(feed, db) as job:
        rows = job.rows("public.typed", key="id").dropDuplicates(["id"])
        assert dict(rows.dtypes) == {"id": "bigint"} | {name: kind for name, (_, kind, _) in known.items()}
        job.merge(rows, into="public.copied", key="id", mode="replace")
    assert connection.execute("select count(*) from copied").fetchone() == (6,)
    for name in known:
        query = f'select t.id, t."{name}"::text, c."{name}"::text from typed t join copied c using (id) order by id'
        different = [
            row for row in connection.execute(query) if row[1] != row[2] and not same(row[1], row[2])
        ]
        assert (name, different) == (name, [])


def same(one, other):
    """Numbers that differ in trailing zeros only, which PostgreSQL takes for equal."""
    return one is not None and other is not None and name_of_number(one) == name_of_number(other)


def name_of_number(text):
    return Decimal(text) if text.lstrip("-").replace(".", "", 1).isdigit() else text


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
    "too many places": ("0.0000000000000000001::numeric", "another range"),
    "too many digits": ("123456789012345678901::numeric", "another range"),
    "array of arrays": ("'{{1,2},{3,4}}'::int[]", "more than one dimension"),
    "array from 0": ("'[0:1]={1,2}'::int[]", "does not begin at 1"),
    "infinity in an array": ("'{infinity}'::timestamptz[]", "infinity"),
    "NaN in an array": ("'{NaN}'::numeric[]", "NaN"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_value_without_a_counterpart_is_refused_by_the_name_of_its_column(db, connect, case):
    value, problem = MISFITS[case]
    query = f"select n as id, case when n = 3 then {value} end as odd_one from generate_series(1, 5) n"
    with pytest.raises(
        UnsupportedType,
        match=f'^odd: column "odd_one" .*{problem}.*, where id is 3: cast the column to text in a view',
    ):
        read(db, connect(), query, 5)


def test_a_type_without_a_counterpart_is_refused_by_the_name_of_its_column(connect):
    with pytest.raises(UnsupportedType, match=r'"amount" is numeric\(50,2\)'):
        describe(connect(), "select 1::numeric(50,2) as amount")


def test_a_misfit_that_an_executor_finds_names_its_column(db, connect, monkeypatch):
    """Seconds where the worker's Spark session starts with it."""
    monkeypatch.setattr("airflow_pgchange.spark.job.SMALL", 0)
    connection = connect()
    connection.execute("create table odd (id bigint primary key, at timestamptz)")
    feed = track(connection, "odd")
    connection.execute("insert into odd values (1, 'infinity')")
    with pytest.raises(Exception, match='column "at" holds infinity'), batch_of(feed, db) as job:
        job.rows("public.odd", key="id").collect()


def test_a_column_that_cannot_be_read_can_be_left_out(db, connect, path):
    """Seconds where the worker's Spark session starts with it."""
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


@pytest.fixture
def contrib():
    """A server that has PostgreSQL's extensions."""
    cluster = new_cluster("system")
    yield cluster.conninfo()
    cluster.remove()


def read(db, connection, query, count):
    columns = describe(connection, query)
    schema = to_arrow_schema(spark_schema(columns), timezone="UTC")
    return [
        row
        for batch in arrow.read(db, None, Partition(query, count), columns, schema, rows=Rows("odd", ("id",)))
        for row in batch.to_pylist()
    ]
