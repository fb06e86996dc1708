"""Types between PostgreSQL and Spark, without a server: the chosen types, and the types that are refused by name."""

from __future__ import annotations

import pytest
from pyspark.sql import types as t

from airflow_pgchange.errors import UnsupportedType
from airflow_pgchange.spark.types import MISFIT, Column, _numeric, reading_query, spark_schema, staging_types
from airflow_pgchange.spark.unsupported_values import Rows


def modifier(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


@pytest.mark.parametrize(
    ("precision", "scale", "expected"),
    [
        (10, 2, (10, 2)),
        (38, 0, (38, 0)),
        (38, 38, (38, 38)),
        (3, -2, (5, 0)),
        (2, 4, (4, 4)),
        (36, -2, (38, 0)),
    ],
)
def test_a_numeric_is_read_as_the_decimal_that_holds_each_of_its_values(precision, scale, expected):
    assert _numeric("n", modifier(precision, scale)).spark == t.DecimalType(*expected)


@pytest.mark.parametrize(("precision", "scale"), [(39, 0), (39, 10), (37, -2), (1000, 0)])
def test_a_numeric_with_more_digits_than_spark_counts_is_refused_by_name(precision, scale):
    with pytest.raises(UnsupportedType, match=rf'"amount" is numeric\({precision},{scale}\)'):
        _numeric("amount", modifier(precision, scale))


def test_a_column_that_cannot_hold_a_misfit_costs_no_check():
    assert MISFIT not in reading_query("select 1 as a", [Column("a", t.IntegerType())])


def test_the_reading_query_quotes_what_users_named():
    column = Column('a "b" {c} 100%', t.StringType(), "{}::pg_catalog.text", "{} is null", "nothing")
    query = reading_query("select '{}' as x", [column])
    assert '"q"."a ""b"" {c} 100%"::pg_catalog.text as "a ""b"" {c} 100%"' in query
    assert "from (select '{}' as x) q" in query


def test_a_misfit_is_refused_by_the_name_of_its_column():
    with pytest.raises(
        UnsupportedType, match=r'^public.plane: column "at" holds infinity, .*where id is 7: cast the column'
    ):
        raise Rows("public.plane", ("id",)).unreadable({"id": 7, "at": None}, "at", "infinity")


def test_each_spark_type_has_the_postgresql_type_that_holds_it_exactly():
    schema = t.StructType().add("b", t.BooleanType()).add("y", t.ByteType()).add("s", t.ShortType())
    schema = schema.add("i", t.IntegerType()).add("l", t.LongType()).add("f", t.FloatType())
    schema = schema.add("d", t.DoubleType()).add("n", t.DecimalType(38, 18)).add("t", t.StringType())
    schema = schema.add("x", t.BinaryType()).add("day", t.DateType()).add("at", t.TimestampType())
    schema = schema.add("clock", t.TimestampNTZType()).add("list", t.ArrayType(t.LongType()))
    assert list(staging_types(schema).values()) == [
        "boolean", "smallint", "smallint", "integer", "bigint", "real", "double precision", "numeric(38,18)", "text",
        "bytea", "date", "timestamp with time zone", "timestamp without time zone", "bigint[]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (t.MapType(t.StringType(), t.LongType()), "to_json"),
        (t.StructType([t.StructField("a", t.LongType())]), "to_json"),
        (t.ArrayType(t.ArrayType(t.LongType())), "to_json"),
        (t.DayTimeIntervalType(), "cast it to string"),
        (t.YearMonthIntervalType(), "cast it to string"),
        (t.NullType(), "cast it to string"),
        (t.VariantType(), "cast it to string"),
    ],
)
def test_a_spark_type_that_postgresql_lacks_is_refused_by_name(kind, advice):
    with pytest.raises(UnsupportedType, match=f'column "odd" is .*{advice}'):
        staging_types(t.StructType([t.StructField("odd", kind)]))


def test_names_that_differ_by_case_only_are_refused_since_spark_takes_them_for_one():
    schema = spark_schema([Column("Id", t.LongType()), Column("id", t.LongType())])
    with pytest.raises(UnsupportedType, match='"id" come twice'):
        staging_types(schema)
