"""The key of a table: which columns can be the key, and the text of its value in an id."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.feeds.keys import text, value
from tests.tubes import one

TABLES = """
create domain positive as smallint check (value > 0);
create domain code as varchar(10);
create type mood as enum ('sad', 'ok, fine');
create table plain (id bigint primary key);
create table small (no positive primary key, other int unique);
create table pair (no int, tenant uuid, name text not null unique, primary key (tenant, no));
create table parted (id bigint, day date, primary key (id, day)) partition by range (day);
create table no_primary (a int not null, b int not null, c int, unique (a, b), unique (c));
create unique index on no_primary (b) where a > 0;
create unique index on no_primary (abs(b));
create table nothing (a int);
create table inexact (id float8 primary key);
"""


@pytest.fixture
def tables(shared):
    if one(shared, "select to_regclass('plain') is null"):
        shared.execute(TABLES)
    return shared


@pytest.mark.parametrize(
    ("table", "columns", "key", "types"),
    [
        ("plain", None, ["id"], ["bigint"]),
        ("small", None, ["no"], ["bigint"]),
        ("pair", None, ["tenant", "no"], ["uuid", "bigint"]),
        ("pair", ["no", "tenant"], ["no", "tenant"], ["bigint", "uuid"]),
        ("pair", ["name"], ["name"], ["text"]),
        ("parted", None, ["id", "day"], ["bigint", "date"]),
        ("no_primary", ["b", "a"], ["b", "a"], ["bigint", "bigint"]),
    ],
)
def test_the_key_is_the_primary_key_or_the_columns_of_a_unique_index(tables, table, columns, key, types):
    query = "select k::text[], pgchange.key_types(%(t)s, k)::text[] from pgchange.check_key(%(t)s, %(c)s::name[], '') k"
    assert tables.execute(query, {"t": table, "c": columns}).fetchone() == (key, types)


@pytest.mark.parametrize(
    ("table", "columns", "told", "hint"),
    [
        ("plain", ["no"], "public.plain has no column no", "leave the key out to use the primary key, id"),
        ("pair", ["tenant"], "column tenant of public.pair is not unique",
         "leave the key out to use the primary key, tenant, no; or name its key: track(key => '{name}')"),
        ("parted", ["id"], "column id of public.parted is not unique", "to use the primary key, id, day"),
        ("small", ["other"], "column other of public.small can be null", "to use the primary key, no"),
        ("no_primary", None, "public.no_primary has no primary key", "name its key: track(key => '{a,b}')"),
        ("no_primary", ["b"], "column b of public.no_primary is not unique", "name its key: track(key => '{a,b}')"),
        ("no_primary", ["a", "c"], "column c of public.no_primary can be null", "name its key"),
        ("no_primary", ["a", "b", "b"], "no unique index on exactly the columns a, b, b", "name its key"),
        ("nothing", None, "public.nothing has no primary key", "give it a primary key or a unique index"),
        ("inexact", None, "column id of public.inexact is double precision: equal values have different texts",
         "the event log accepts tables without one"),
    ],
)  # fmt: skip
def test_columns_that_name_no_row_are_refused_with_the_keys_of_the_table(tables, table, columns, told, hint):
    with pytest.raises(psycopg.Error) as refused:
        tables.execute("select pgchange.check_key(%s, %s::name[], 'track(key => %%s)')", [table, columns])
    assert refused.value.sqlstate == "PC008"
    assert told in str(refused.value.diag.message_primary)
    assert hint in str(refused.value.diag.message_hint)


VALUES = {
    "uuid": "0c2f5c1e-0000-4000-8000-00000000000a",
    "text": "a, \"b\" 'c' \\ {é}",
    "varchar(5)": "x",
    "char(5)": "x",
    "code": "x",
    "name": "x",
    "positive": 7,
    "numeric": "1.5",
    "boolean": "true",
    "date": "2026-11-29",
    "timestamp": "2026-11-29 14:00:00.5",
    "timestamptz": "2026-11-29 14:00:00+00",
    "time": "14:00:00",
    "bytea": "\\x00ff",
    "bit(3)": "101",
    "varbit": "101",
    "inet": "10.0.0.1",
    "cidr": "10.0.0.0/8",
    "macaddr": "08:00:2b:01:02:03",
    "pg_lsn": "16/B374D848",
    "xid8": "18446744073709551615",
    "oid": "4294967295",
    "mood": "ok, fine",
}


def test_a_key_of_all_types_at_once_has_one_text_and_finds_its_row(tables):
    """The settings of a session change neither of the two."""
    columns = [f"c{place}" for place in range(len(VALUES))]
    made = ", ".join(f"{name} {kind}" for name, kind in zip(columns, VALUES, strict=True))
    tables.execute(f"create temp table wide ({made}, unique ({', '.join(columns)}))")
    for name in columns:
        tables.execute(f"alter table wide alter {name} set not null")
    tables.execute(f"insert into wide values ({', '.join(['%s'] * len(VALUES))})", list(VALUES.values()))
    types = one(tables, "select pgchange.key_types('wide', %s::name[])::text[]", columns)
    query = one(tables, "select pgchange.key_text('wide'::regclass, %s::name[], 'w')", columns)
    assert one(tables, "select pgchange.key_trouble('wide', %s::name[])", columns) is None
    settings = one(tables, "select pgchange.key_settings(%s::regtype[])", types)
    tables.execute("set timezone = 'Asia/Kolkata'; set datestyle = 'German'; set bytea_output = 'escape'")
    try:
        tables.execute(
            f"create function pg_temp.key(w wide) returns text language sql {settings} as $$ select {query} $$"
        )
        sent = one(tables, "select pg_temp.key(w) from wide w")
        found = one(
            tables, "select pgchange.key_condition(%s::regtype[], %s::name[], 'w', %s)", types, columns, sent
        )
        tables.execute("set timezone = 'UTC'; set datestyle = 'ISO'; set bytea_output = 'hex'")
        assert one(tables, f"select count(*) from wide w where {found}") == 1
    finally:
        tables.execute("reset timezone; reset datestyle; reset bytea_output")
    assert value(sent, types) == tuple(VALUES.values())
    assert text(value(sent, types)) == sent


@pytest.mark.parametrize(
    ("kind", "other"), [("numeric", "1.50"), ("char(5)", "x  "), ("inet", "10.0.0.1/32")]
)
def test_equal_values_have_one_text(tables, kind, other):
    tables.execute(f"drop table if exists same; create temp table same (id {kind})")
    tables.execute("insert into same values (%s), (%s)", [VALUES[kind], other])
    query = one(tables, "select pgchange.key_text('same'::regclass, '{id}', 's')")
    assert one(tables, f"select count(distinct {query}) from same s") == 1


@pytest.mark.parametrize(
    "kind", ["real", "interval", "jsonb", "money", "int[]", "int4range", "timetz", "tsvector", "\"char\"", "regclass"]
)  # fmt: skip
def test_a_type_whose_equal_values_can_have_several_texts_is_no_key(tables, kind):
    assert one(tables, "select pgchange.key_type_trouble(%s::regtype, 0)", kind)


def test_a_text_is_no_key_under_a_collation_that_takes_different_texts_for_equal(tables):
    """Without ICU no such collation can be created. So this case has the mark of servers with ICU."""
    tables.execute(
        "create collation blind (provider = libc, locale = 'C');"
        "create table blinded (id text collate blind primary key);"
        "update pg_collation set collisdeterministic = false where collname = 'blind'"
    )
    told = one(tables, "select pgchange.key_trouble('blinded', '{id}')")
    assert (
        told
        == "column id of public.blinded is text: equal values can have different texts under its collation"
    )


def test_an_enum_whose_owner_made_a_cast_is_read_without_it(tables):
    tables.execute(
        "create type hue as enum ('red'); create table hued (id hue primary key);"
        "create function lie(hue) returns text language sql as $$ select 'stolen' $$;"
        "create cast (hue as text) with function lie(hue); insert into hued values ('red')"
    )
    query = one(tables, "select pgchange.key_text('hued'::regclass, '{id}', 'h')")
    assert one(tables, f"select {query} from hued h") == "red"
