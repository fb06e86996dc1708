"""Rows, ids that are gone, and mirrors by keys of other types than bigint, and of several columns."""

from __future__ import annotations

import pytest
from pyspark.sql import types as t

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.spark.read_options import ReadOptions
from airflow_pgchange.spark.source import Reading
from tests.given_keys import given, job_of

COLUMNS = {
    "tenant": ("bigint", "integer"),
    "id": ("uuid", "uuid"),
    "code": ("text", "varchar(9)"),
    "pad": ("text", "char(4)"),
    "called": ("text", "name"),
    "price": ("numeric", "numeric(9,2)"),
    "free": ("numeric", "numeric"),
    "day": ("date", "date"),
    "at": ("timestamp with time zone", "timestamptz(3)"),
    "local": ("timestamp without time zone", "timestamp"),
    "clock": ("time without time zone", "time"),
    "bytes": ("bytea", "bytea"),
    "bits": ("bit", "bit(3)"),
    "host": ("inet", "inet"),
    "flag": ("boolean", "boolean"),
    "object": ("oid", "oid"),
    "mood": ("mood", "mood"),
    "brief": ("text", "brief"),
}
"""The key columns: the type of the key and the type of the column, by the column's name."""
TYPES = [kind for kind, _ in COLUMNS.values()]
KEYS = list(COLUMNS)
UUID = "c3b0a4ce-0000-4000-8000-00000000000"


def row(n, mood="sad"):
    """Return the key of row n.

    It has values with commas, quotes, spaces, eras and time zone offsets, on which a wrong parser would fail.
    """
    return (
        n, f"{UUID}{n}", f' "é,{n}', f"a{n}", f"n{{{n}", f"{n}.5", f"-0.00{n}", f"004{n}-03-15 BC",
        f"2024-11-03 01:30:00.12{n}+00", f"2024-03-10 02:30:00.00000{n}", f"0{n}:00:00", f"\\x00{n}f",
        f"{n:03b}", f"10.0.0.{n}", "true", str(2**32 - n), mood, f"\\{n}",
    )  # fmt: skip


TABLE = ", ".join(f'"{name}" {kind}' for name, (_, kind) in COLUMNS.items())
NAMES = ", ".join(f'"{name}"' for name in KEYS)


@pytest.fixture
def tables(connect):
    connection = connect()
    connection.execute(
        "create type mood as enum ('sad', 'happy'); create domain brief as varchar(7); "
        f"create table source ({TABLE}, note text, primary key ({NAMES})); "
        f"create table copy ({TABLE}, note text, primary key ({NAMES}))"
    )
    return connection


def put(connection, table, keys, note):
    with connection.cursor() as cursor:
        marks = ", ".join(["%s"] * (len(KEYS) + 1))
        cursor.executemany(f"insert into {table} values ({marks})", [(*key, note) for key in keys])


def by_table(job):
    job.mirror("source", "copy", key=KEYS)


def by_rows(job):
    job.merge(job.rows("source", key=KEYS), into="copy", key=KEYS, mode="mirror")


@pytest.mark.parametrize(("small", "mirror"), [(1_000_000, by_rows), (0, by_table)])
def test_a_mirror_by_a_key_of_every_type_follows_its_table(db, tables, monkeypatch, small, mirror):
    monkeypatch.setattr("airflow_pgchange.spark.job.SMALL", small)
    put(tables, "source", [row(1), row(2), row(5, "happy")], "new")
    put(tables, "copy", [row(2), row(3), row(4)], "old")
    # The values of this id do not fit the columns of the mirror's key, so the id belongs to another table.
    foreign = (2**40, *row(6)[1:])
    given(tables, [row(1), row(2), row(2), row(3), row(5, "happy"), foreign])
    with job_of(db, TYPES, 6) as job:
        mirror(job)
    assert tables.execute("select tenant, note from copy order by 1").fetchall() == [
        (1, "new"),
        (2, "new"),
        (4, "old"),
        (5, "new"),
    ]
    assert tables.execute(f"select count(*) from source join copy using ({NAMES})").fetchone() == (3,)


def test_the_id_of_one_column_is_a_string_and_of_several_an_array_of_strings(db, connection):
    connection.execute(
        "create table one (id uuid primary key, note text); "
        "create table two (tenant int, no text, primary key (no, tenant))"
    )
    connection.execute(f"insert into one values ('{UUID}1', 'a'); insert into two values (1, 'x,y')")
    given(connection, [f"{UUID}1", f"{UUID}2"])
    with job_of(db, ["uuid"], 2) as job:
        assert (
            job.changes().schema["id"].dataType
            == job.gone("one", "id").schema["id"].dataType
            == t.StringType()
        )
        assert [tuple(each) for each in job.rows("one", "id").collect()] == [(f"{UUID}1", "a")]
        assert [each.id for each in job.gone("one", ["id"]).collect()] == [f"{UUID}2"]
    given(connection, [(1, "x,y"), (2, "x,y")])
    with job_of(db, ["bigint", "text"], 2) as job:
        assert [each.id for each in job.changes().collect()] == [["1", "x,y"], ["2", "x,y"]]
        assert [tuple(each) for each in job.rows("two", ["tenant", "no"]).collect()] == [(1, "x,y")]
        assert [each.id for each in job.gone("two", ["tenant", "no"]).collect()] == [["2", "x,y"]]


def test_the_row_of_a_key_is_found_through_its_index(db, connection):
    connection.execute(
        "create table plane (tail uuid, day date, primary key (tail, day)); "
        "insert into plane select gen_random_uuid(), date '2024-01-01' + n from generate_series(1, 2000) as n; "
        "analyze plane"
    )
    keys = connection.execute("select tail::text, day::text from plane limit 3").fetchall()
    given(connection, keys)
    connection.execute("analyze given; set enable_seqscan = off")
    with job_of(db, ["uuid", "date"], 3) as job:
        assert job.rows("plane", ["tail", "day"]).count() == 3
        reading = Reading.prepare(job.feed, job.batch, db, ReadOptions("plane", ("tail", "day")))
        query = reading.partitions(1)[0].query
    plan = "\n".join(line for (line,) in connection.execute(f"explain {query}").fetchall())
    assert "Index Cond: ((tail = " in plan
    assert "plane_pkey" in plan


def test_a_key_of_other_columns_than_the_ids_is_refused(db, connection):
    connection.execute("create table two (tenant int, no text, primary key (tenant, no))")
    connection.execute("create table copy (tenant int, no text, primary key (tenant, no))")
    given(connection, [(1, "x")])
    with job_of(db, ["bigint", "text"], 1) as job:
        with pytest.raises(
            InvalidArgument, match=r"have 2 columns \(bigint, text\), but key has 1 \(tenant\)"
        ):
            job.rows("two", "tenant")
        with pytest.raises(
            InvalidArgument, match='"no" of the key is text, and the ids of the changes are bigint'
        ):
            job.gone("two", ["no", "tenant"])
        with pytest.raises(InvalidArgument, match='two has no column "na"'):
            job.mirror("two", "copy", key=["tenant", "na"])
        rows = job.rows("two", ["tenant", "no"])
        with pytest.raises(
            MergeRefused, match='"no" comes as text, but this column of the changes\' ids is bigint'
        ):
            job.merge(rows, "copy", ["no", "tenant"], "mirror")
        with pytest.raises(MergeRefused, match="must end with all 2 columns"):
            connection.execute("create unique index on copy (no)")
            job.merge(rows, "copy", ["no"], "mirror")
        dates = rows.selectExpr("tenant", "date '2024-01-01' as no")
        connection.execute("alter table copy alter no type date using now()")
        with pytest.raises(MergeRefused, match='"no" of the key comes as date, but the ids .* are string'):
            job.merge(dates, "copy", ["tenant", "no"], "mirror")
