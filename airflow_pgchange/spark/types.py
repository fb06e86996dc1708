"""Conversion between PostgreSQL's and Spark's types. It is exact, or raises an error that names the column.

Types that Spark lacks (uuid, json, enums, intervals, times of day, ranges, inet, hstore, composites, ...) are read as
PostgreSQL's text. The text can be written back into the same type.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from airflow_pgchange.errors import UnsupportedType
from airflow_pgchange.feeds.error_translation import translated

MISFIT = "pgchange_misfit"
"""The last column of a reading query: NULL, or the number of a column whose value in this row has no counterpart in
Spark."""
MAX_DIGITS = 38
DECIMAL = t.DecimalType(38, 18)
"""The type of a numeric without precision.

Numbers are sent as text and become decimals here. The conversion fails for NaN, infinity and too many digits.
"""

PINNED: Mapping[str, str] = {
    "timezone": "UTC",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "xmlbinary": "base64",
    "xmloption": "content",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "backslash_quote": "on",
    "gin_fuzzy_search_limit": "0",
    "plpgsql.check_asserts": "on",
}
"""Settings under which a query and PostgreSQL's text have the same meaning in every session.

They are those of ``pgchange.pinned_settings()`` without two. ``row_security`` is not changed: if it is off for the
role, a query fails instead of losing rows to row security. ``default_text_search_config`` is looked up in the database,
and not changed if our schema is not installed.
"""
_SESSION = """
    select {settings}, pg_catalog.set_config('jit', 'off', {local}),
           pg_catalog.set_config('default_text_search_config', coalesce(
               (select pg_catalog.split_part(c, '=', 2)
                from pg_catalog.pg_proc p cross join pg_catalog.unnest(p.proconfig) c
                where p.oid = pg_catalog.to_regprocedure('pgchange.pinned_settings()')
                  and pg_catalog.starts_with(c, 'default_text_search_config=')),
               pg_catalog.current_setting('default_text_search_config')), {local})
"""


# Before Spark 4.2 the function has no argument for the time zone, and always takes UTC.
_IN_UTC: dict[str, Any] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
)


def arrow_schema(schema: t.StructType) -> pa.Schema:
    """Return the Arrow form of a schema, whose timestamps with time zone are in UTC."""
    return to_arrow_schema(schema, **_IN_UTC)


def session(*, local: bool) -> str:
    """Return the query that pins the settings of a reading session, or of its transaction only (``local``).

    It also turns JIT off, because compiling costs more time than a partition saves by it.
    """
    settings = [
        sql.SQL("pg_catalog.set_config({}, {}, {})").format(name, value, local)
        for name, value in PINNED.items()
    ]
    return sql.SQL(_SESSION).format(settings=sql.SQL(", ").join(settings), local=local).as_string(None)


@dataclass(frozen=True)
class Column:
    """How one column of a query is read.

    ``cast`` is the PostgreSQL expression to select. ``unsupported_if`` is the condition under which a value has no
    counterpart in Spark, and ``problem`` describes such a value. ``{}`` stands for the column in both expressions.
    """

    name: str
    spark: t.DataType
    cast: str = "{}"
    unsupported_if: str | None = None
    problem: str = ""


_NATIVE: Mapping[str, t.DataType] = {
    "bool": t.BooleanType(),
    "int2": t.ShortType(),
    "int4": t.IntegerType(),
    "int8": t.LongType(),
    "float4": t.FloatType(),
    "float8": t.DoubleType(),
    "text": t.StringType(),
    "varchar": t.StringType(),
    "bpchar": t.StringType(),
    "bytea": t.BinaryType(),
    "date": t.DateType(),
    "timestamp": t.TimestampNTZType(),
    "timestamptz": t.TimestampType(),
}
_LATEST = "294247-01-01"
"""Spark counts microseconds from 1970 in 64 bits, which end in this year."""
_UNSUPPORTED_IF: Mapping[str, tuple[str, str]] = {
    "date": ("not pg_catalog.isfinite({})", "infinity"),
    "timestamp": (
        f"not ({{}} > '-infinity' and {{}} < timestamp '{_LATEST}')",
        f"infinity or a time after {_LATEST}",
    ),
    "timestamptz": (
        f"not ({{}} > '-infinity' and {{}} < timestamptz '{_LATEST} 00:00:00+00')",
        f"infinity or a time after {_LATEST}",
    ),
}


def describe(connection: psycopg.Connection[Any], query: str) -> list[Column]:
    """Return how to read the columns of a query. Raises UnsupportedType, with the column's name, if a column cannot be
    read."""
    with translated():
        cursor = connection.execute(sql.SQL("select * from ({}) q limit 0").format(sql.SQL(query)))
        result = cursor.pgresult
        if result is None:
            return []
        described = [
            (str((result.fname(i) or b"").decode()), result.ftype(i), result.fmod(i))
            for i in range(result.nfields)
        ]
        kinds = _kinds(connection, {oid for _, oid, _ in described})
    _refuse_twins([name for name, _, _ in described])
    return [_column(name, *kinds[oid], modifier) for name, oid, modifier in described]


def reading_query(query: str, columns: Sequence[Column]) -> str:
    """Return the query whose rows ADBC reads exactly, with our casts. It has the column MISFIT if a column can hold a
    misfit."""
    selected = [
        sql.SQL("{} as {}").format(_over(column.cast, column), sql.Identifier(column.name))
        for column in columns
    ]
    cases = [
        sql.SQL("when {} then {}").format(_over(column.unsupported_if, column), index)
        for index, column in enumerate(columns)
        if column.unsupported_if is not None
    ]
    if cases:
        either = sql.SQL("case {} end as {}").format(sql.SQL(" ").join(cases), sql.Identifier(MISFIT))
        selected.append(either)
    return (
        sql.SQL("select {} from ({}) q").format(sql.SQL(", ").join(selected), sql.SQL(query)).as_string(None)
    )


def spark_schema(columns: Sequence[Column]) -> t.StructType:
    return t.StructType([t.StructField(column.name, column.spark) for column in columns])


def staging_types(schema: t.StructType) -> dict[str, str]:
    """Return the PostgreSQL type in which each column is staged. Raises UnsupportedType, with the column's name, if
    there is none."""
    _refuse_twins(schema.names)
    return {field.name: _staging_type(field.name, field.dataType) for field in schema.fields}


_STAGED: Mapping[type[t.DataType], str] = {
    t.BooleanType: "boolean",
    t.ByteType: "smallint",
    t.ShortType: "smallint",
    t.IntegerType: "integer",
    t.LongType: "bigint",
    t.FloatType: "real",
    t.DoubleType: "double precision",
    t.StringType: "text",
    t.BinaryType: "bytea",
    t.DateType: "date",
    t.TimestampType: "timestamp with time zone",
    t.TimestampNTZType: "timestamp without time zone",
}


def _staging_type(name: str, kind: t.DataType) -> str:
    inner, array = (kind.elementType, "[]") if isinstance(kind, t.ArrayType) else (kind, "")
    if isinstance(inner, t.DecimalType):
        return f"numeric({inner.precision},{inner.scale}){array}"
    if type(inner) in _STAGED:
        return _STAGED[type(inner)] + array
    advice = (
        "to_json(...)" if isinstance(kind, t.StructType | t.MapType | t.ArrayType) else "cast it to string"
    )
    raise UnsupportedType(
        f'column "{name}" is {kind.simpleString()}, which PostgreSQL has no type for: use {advice} before merging'
    )


def _kinds(connection: psycopg.Connection[Any], oids: set[int]) -> dict[int, tuple[str, str | None]]:
    """Return the name of each type, and for an array the name of its elements' type. A domain has the name of its base
    type."""
    rows = connection.execute(
        sql.SQL(
            "with recursive element (oid, kind) as ("
            "select t.oid, t.typelem from pg_catalog.pg_type t "
            "join pg_catalog.pg_type e on e.oid = t.typelem and e.typarray = t.oid where t.oid = any({0}) "
            "union all select element.oid, t.typbasetype from element "
            "join pg_catalog.pg_type t on t.oid = element.kind and t.typtype = 'd') "
            "select t.oid, t.typname, (select e.typname from element join pg_catalog.pg_type e on e.oid = element.kind "
            "where element.oid = t.oid and e.typtype <> 'd') from pg_catalog.pg_type t where t.oid = any({0})"
        ).format(list(oids))
    )
    return {oid: (name, element) for oid, name, element in rows.fetchall()}


def _column(name: str, kind: str, element: str | None, modifier: int) -> Column:
    if element is None:
        read = _read(name, kind, modifier)
        return Column(name, read.spark, read.cast(), read.unsupported_if, read.problem)
    read = _read(name, element, modifier)
    unsupported_if = "pg_catalog.array_ndims({}) > 1 or pg_catalog.array_lower({}, 1) <> 1"
    problem = "an array with several dimensions, or whose first index is not 1"
    if read.unsupported_if is not None:
        inside = read.unsupported_if.replace("{}", "e.value")
        unsupported_if += f" or exists (select from pg_catalog.unnest({{}}) e (value) where {inside})"
        problem += f", or in it {read.problem}"
    return Column(name, t.ArrayType(read.spark), read.cast("[]"), unsupported_if, problem)


@dataclass(frozen=True)
class _Read:
    """How a scalar type is read: the casts to apply in turn, and the values without a counterpart in Spark."""

    spark: t.DataType
    casts: tuple[str, ...]
    unsupported_if: str | None = None
    problem: str = ""

    def cast(self, dimensions: str = "") -> str:
        return "{}" + "".join(f"::pg_catalog.{kind}{dimensions}" for kind in self.casts)


def _read(name: str, kind: str, modifier: int) -> _Read:
    if kind == "numeric":
        return _numeric(name, modifier)
    if kind in _NATIVE:
        return _Read(_NATIVE[kind], (kind,), *_UNSUPPORTED_IF.get(kind, (None, "")))
    if kind == "money":
        return _Read(DECIMAL, ("numeric", "text"))
    if kind == "oid":
        return _Read(t.LongType(), ("int8",))
    return _Read(t.StringType(), ("text",))


def _numeric(name: str, modifier: int) -> _Read:
    """Return how a numeric is read. Its modifier holds the precision and the scale, a signed number of 11 bits
    (PostgreSQL 15)."""
    if modifier < 0:
        return _Read(DECIMAL, ("text",))
    precision, scale = (modifier - 4) >> 16, (((modifier - 4) & 0x7FF) ^ 0x400) - 0x400
    digits = max(precision, scale) - min(scale, 0)
    if digits > MAX_DIGITS:
        raise UnsupportedType(
            f'column "{name}" is numeric({precision},{scale}), but Spark has at most {MAX_DIGITS} digits. Cast it to '
            f"text in a view and read that, or leave it out with "
            "columns=[...]"
        )
    return _Read(t.DecimalType(digits, max(scale, 0)), ("text",))


def _over(template: str, column: Column) -> sql.Composable:
    return sql.SQL(template.replace("{}", "{0}")).format(sql.Identifier("q", column.name))


def _refuse_twins(names: Sequence[str]) -> None:
    """Raise UnsupportedType if two names differ only by case, because Spark does not tell them apart."""
    twins = [name for name, count in Counter(map(str.lower, names)).items() if count > 1]
    if twins:
        raise UnsupportedType(
            f'columns called "{twins[0]}" come twice (Spark does not tell names apart by case). Choose columns with '
            f"columns=[...], or rename them in a "
            "view"
        )
