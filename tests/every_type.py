"""A column of every type of PostgreSQL with its extreme values, for round-trip tests."""

from __future__ import annotations

from decimal import Decimal

import psycopg
from psycopg import sql

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
    """The types that this server has. A server may be built without xml."""
    try:
        connection.execute("select '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:
        return {name: column for name, column in COLUMNS.items() if column[0] != "xml"}
    return COLUMNS


def make_tables(connection, more=()):
    """Create the tables ``typed`` and ``copied``, and return their columns by name.

    They have a column of every type that the server has, and bigint columns with the names in ``more``. The table
    ``typed`` has a row of NULLs and a row for each value.
    """
    known = {**columns_of(connection), **{name: ("bigint", "bigint", ["1", "-2"]) for name in more}}
    connection.execute(DDL)
    connection.execute("set datestyle = 'SQL, DMY'; set timezone = 'Asia/Tokyo'")
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, (kind, _, _) in known.items()
    )
    for table in ("typed", "copied"):
        connection.execute(
            sql.SQL("create table {} (id bigint primary key, {})").format(sql.SQL(table), columns)
        )
    return known


def fill(connection, known):
    connection.execute("insert into typed (id) values (0)")
    for name, (_, _, values) in known.items():
        for number, value in enumerate(values, 1):
            insert = sql.SQL(
                "insert into typed (id, {0}) values ({1}, {2}) on conflict (id) do update set {0} = excluded.{0}"
            )
            connection.execute(insert.format(sql.Identifier(name), sql.SQL(str(number)), sql.SQL(value)))


def differences(connection, known):
    """Return the differences between the copy and the table: column, id and both values as text."""
    found = []
    for name in known:
        query = sql.SQL(
            "select t.id, t.{0}::text, c.{0}::text from typed t left join copied c using (id) order by id"
        ).format(sql.Identifier(name))
        rows = connection.execute(query).fetchall()
        found += [(name, *row) for row in rows if row[1] != row[2] and not same(row[1], row[2])]
    return found


def same(one, other):
    """Whether two numbers differ only in trailing zeros, so that PostgreSQL takes them for equal."""
    return one is not None and other is not None and name_of_number(one) == name_of_number(other)


def name_of_number(text):
    return Decimal(text) if text.lstrip("-").replace(".", "", 1).isdigit() else text
