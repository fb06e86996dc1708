"""Each type of Arrow arrives in a table of each format exactly as it is, or is refused before a file is written.

The table of types in the guide is compared with the values that arrive here.
"""

from __future__ import annotations

import re
import uuid
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from importlib.metadata import version

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from packaging.version import Version

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake import Delta, Iceberg, write
from airflow_pgchange.spark.types import arrow_schema, describe, spark_schema
from tests import every_type, readme
from tests.lakes import Lake
from tests.staging import BATCH

AT = datetime(2013, 7, 1, 5, 17, 0, 1)
FAR = 3_652_059
"""Days after 1970: a date of the year 11969, which Python's dates do not reach."""
TYPES = [
    (pa.bool_(), True),
    (pa.int8(), -128),
    (pa.int16(), -32768),
    (pa.int32(), 2147483647),
    (pa.int64(), -(2**63)),
    (pa.uint8(), 255),
    (pa.uint16(), 65535),
    (pa.uint32(), 4294967295),
    (pa.uint64(), 2**64 - 1),
    (pa.float16(), np.float16(0.5)),
    (pa.float32(), float("inf")),
    (pa.float64(), 1e300),
    (pa.decimal128(38, 10), Decimal("1234567890123456789012345678.0123456789")),
    (pa.decimal128(5, 5), Decimal("-0.00001")),
    (pa.decimal128(5, -2), Decimal("12300")),
    (pa.decimal256(50, 2), Decimal("123.45")),
    (pa.string(), "é\n\x01"),
    (pa.large_string(), ""),
    (pa.string_view(), "view"),
    (pa.dictionary(pa.int32(), pa.string()), "one of few"),
    (pa.binary(), b"\x00\xff"),
    (pa.large_binary(), b""),
    (pa.binary_view(), b"view"),
    (pa.binary(16), b"0123456789abcdef"),
    (pa.uuid(), uuid.UUID("c3b0a4ce-0000-4000-8000-000000000001").bytes),
    (pa.date32(), date(44, 3, 15)),
    (pa.date64(), date(2013, 1, 1)),
    (pa.time32("ms"), time(5, 17)),
    (pa.time64("us"), time(5, 17, 0, 1)),
    (pa.timestamp("s"), datetime(2013, 7, 1)),
    (pa.timestamp("ms"), datetime(2013, 7, 1, 5, 17, 0, 1000)),
    (pa.timestamp("us"), AT),
    (pa.timestamp("ns"), AT),
    (pa.timestamp("us", "UTC"), datetime.max.replace(tzinfo=UTC)),
    (pa.timestamp("us", "America/New_York"), datetime.min.replace(tzinfo=UTC) + timedelta(days=1)),
    (pa.timestamp("ns", "UTC"), AT.replace(tzinfo=UTC)),
    (pa.duration("us"), timedelta(microseconds=1)),
    (pa.month_day_nano_interval(), (1, 2, 3)),
    (pa.null(), None),
    (pa.list_(pa.int32()), [1, None]),
    (pa.large_list(pa.string()), []),
    (pa.list_(pa.int32(), 2), [1, 2]),
    (pa.list_(pa.list_(pa.decimal128(5, 2))), [[Decimal("1.25")], None]),
    (pa.map_(pa.string(), pa.string()), [("a", None)]),
    (pa.map_(pa.int32(), pa.list_(pa.date32())), [(1, [date(1, 1, 1)])]),
    (pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))]), {"a": 1, "b": {"c": None}}),
    (pa.list_(pa.struct([("at", pa.timestamp("us", "UTC"))])), [{"at": AT.replace(tzinfo=UTC)}]),
]
COLUMNS = {
    pa.uint8(): pa.int16(),
    pa.decimal128(5, -2): pa.decimal128(7, 0),
    pa.decimal256(50, 2): pa.decimal128(38, 2),
    pa.float16(): pa.float32(),
    pa.dictionary(pa.int32(), pa.string()): pa.string(),
    pa.date64(): pa.date32(),
    pa.timestamp("s"): pa.timestamp("us"),
    pa.timestamp("ms"): pa.timestamp("us"),
    pa.timestamp("us", "America/New_York"): pa.timestamp("us", "UTC"),
    pa.list_(pa.int32(), 2): pa.list_(pa.int32()),
}
"""By type of Arrow: the most similar type of a column, if no table has the type itself."""


@pytest.fixture
def made(db, tmp_path):
    """Create a table with one column, a text if the format lacks the type. Return a function that reads it, and the
    column's type."""

    def make(kind, number, column):
        schema = pa.schema([("c", column)])
        if kind == "iceberg":
            table = lake.table(schema, f"t{number}")
            has = table.schema().fields[0].field_type
            return Iceberg(f"sales.t{number}", "lake"), lambda: table.refresh().scan().to_arrow(), str(has)
        where = str(tmp_path / f"t{number}")
        DeltaTable.create(where, schema)
        has = DeltaTable(where).schema().fields[0].type.type
        return Delta(where), lambda: DeltaTable(where).to_pyarrow_table(), has

    def made(kind, number, column):
        """Create the table, with a text column if the format lacks the type.

        Each format raises an exception of its own for such a type.
        """
        with suppress(Exception):
            return make(kind, number, column)
        return make(kind, number, pa.string())

    lake = Lake(db, tmp_path)
    return made


REFUSED = "refused"


def shown(type_):
    """Return the name of a type of Arrow in the guide."""
    if getattr(type_, "tz", None) not in (None, "UTC"):
        return "timestamp[us, tz=...]"
    if pa.types.is_list(type_) and pa.types.is_struct(type_.value_type):
        return "list<struct>"
    return in_general(str(type_).replace("extension<arrow.uuid>", "uuid"))


def in_general(name):
    """Return the name of a type without lengths and without the types of its parts."""
    name = re.sub(r"\(\d+, ?(-?)\d+\)", r"(p, \1s)", name)
    return re.sub(r"<.*|\[\d+\]", "", name)


def guide():
    """Return the guide's table of types: types of PostgreSQL, types of Arrow, and the column of each format."""
    for row in readme.table("docs/how-to/lake.md", "## Types"):
        postgresql, arrow, *columns = (re.findall("`(.+?)`", cell) for cell in row)
        iceberg, delta = (column[0] if column else REFUSED for column in columns)
        yield postgresql, arrow, {"iceberg": iceberg, "delta": delta}


NEITHER = {
    "uint32", "uint64", "decimal256(50, 2)", "date64[ms]", "time32[ms]", "timestamp[ns]", "timestamp[ns, tz=UTC]",
    "duration[us]", "month_day_nano_interval",
}  # fmt: skip
DELTA = {
    "uint8", "uint16", "halffloat", "decimal128(5, -2)", "dictionary<values=string, indices=int32, ordered=0>",
    "fixed_size_binary[16]", "extension<arrow.uuid>", "time64[us]", "fixed_size_list<item: int32>[2]",
}  # fmt: skip
ICEBERG = {"null", "list<item: struct<at: timestamp[us, tz=UTC]>>"}
if Version(version("pyiceberg")) < Version("0.12"):
    ICEBERG.add("halffloat")


@pytest.mark.parametrize(("kind", "refused"), [("delta", NEITHER | DELTA), ("iceberg", NEITHER | ICEBERG)])
def test_a_value_of_each_type_is_exact_or_refused(made, db, tmp_path, kind, refused):
    found, arrived = set(), {}
    for number, (type_, value) in enumerate(TYPES):
        table, read, column = made(kind, number, COLUMNS.get(type_, type_))
        rows = pa.table({"c": pa.array([value, None], type_)})
        with psycopg.connect(db) as connection:
            try:
                write(connection, replace(BATCH, id=str(number)), table, rows)
            except MergeRefused:
                found.add(str(type_))
                arrived[shown(type_)] = REFUSED
                continue
        arrived[shown(type_)] = in_general(column)
        assert read().column("c").cast(type_).equals(rows.column("c")), type_
    assert found == refused
    assert len(list(tmp_path.rglob("*.parquet"))) == len(TYPES) - len(refused)
    documented = {type_: columns[kind] for _, arrow, columns in guide() for type_ in arrow}
    assert arrived == documented | dict.fromkeys(ICEBERG & {"halffloat"}, REFUSED)


DOMAINS = {"positive": "integer", "price": "numeric", "numbers": "integer[]", "int": "integer"}


def test_the_guide_says_as_which_type_spark_reads_each_type_of_postgresql(connect):
    connection = connect()
    known = every_type.make_tables(connection)
    read = arrow_schema(spark_schema(describe(connection, "select * from typed")))
    listed = {name: arrow[0] for names, arrow, _ in guide() for name in names}
    names = {column: re.sub(r"\(.*\)", "", DOMAINS.get(kind, kind)) for column, (kind, *_) in known.items()}
    for column, name in names.items():
        other = "list" if name.endswith("[]") else "string"
        assert (name, listed.get(name, other)) == (name, shown(read.field(column).type))
    assert set(listed) <= set(names.values())
