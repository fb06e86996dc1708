"""Forty types of a key: each is either accepted with an exact text, or refused with the reason."""

from __future__ import annotations

import pytest
from psycopg import sql

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.feed import partitions
from airflow_pgchange.feeds.key_columns import found_by, key_columns, parts
from airflow_pgchange.feeds.keys import text, value
from airflow_pgchange.feeds.reading import current_rows
from airflow_pgchange.tubes.copies import TRUE
from airflow_pgchange.tubes.table_ids import HeldIds
from tests.tubes import one

DDL = """
create type mood as enum ('sad', 'ok, fine', '{}');
create type pair as (x int, y text);
create domain positive as smallint check (value > 0);
create domain brief as varchar(9);
create domain price as numeric(8, 2);
"""
TAKEN = {
    "smallint": ["-32768", "32767", "0"],
    "integer": ["-2147483648", "2147483647", "7"],
    "bigint": ["-9223372036854775808", "9223372036854775807", "7"],
    "positive": ["1", "32767"],
    "oid": ["0", "4294967295"],
    "xid8": ["0", "18446744073709551615"],
    "uuid": ["C3B0A4CE00004000800000000000000A", "{c3b0a4ce-0000-4000-8000-00000000000a}"],
    "text": ["", "NULL", "é, \"b\" {c} \\ 'd'", "a ", "a", "A", "e\u0301", "é", "x" * 3000],
    "varchar(9)": ["a ", "a", "\t"],
    "brief": ["a", "b,c"],
    "char(4)": ["a ", "a", "a  ", " a"],
    "name": ["a", "x" * 63],
    "boolean": ["yes", "t", "false"],
    "mood": ["sad", "ok, fine", "{}"],
    "numeric": ["1.50", "1.5", "1e2", "100", "0", "-0.0", "NaN", "Infinity", "-Infinity", "1e-300", "9" * 300],
    "price": ["1.5", "1.50", "-999999.99"],
    "date": ["2024-02-29", "20240229", "infinity", "-infinity", "4713-01-01 BC", "5874897-12-31", "1582-10-10"],
    "time": ["24:00:00", "00:00:00", "12:00", "12:00:00.000000", "23:59:59.999999"],
    "timestamp": ["2024-03-10 02:30:00.123456", "infinity", "4713-01-01 BC", "294276-12-31 23:59:59.999999"],
    "timestamptz": ["2024-11-03 01:30:00-04", "2024-11-03 05:30:00Z", "2024-11-03 01:30:00-05", "-infinity"],
    "timestamptz(0)": ["2024-11-03 01:30:00.4-04", "2024-11-03 05:30:00.1Z"],
    "bytea": ["\\x", "\\x00ff5c", "\\x5c78"],
    "bit(3)": ["101", "000"],
    "varbit": ["", "101", "0101"],
    "inet": ["10.0.0.1", "10.0.0.1/32", "10.0.0.1/24", "::1", "0:0:0:0:0:0:0:1", "::ffff:1.2.3.4"],
    "cidr": ["10.0.0.0/8", "10", "10.0.0.1/32", "::/0"],
    "macaddr": ["08:00:2b:01:02:03", "08002b-010203"],
    "macaddr8": ["08:00:2b:01:02:03:04:05", "08002b:010203"],
    "pg_lsn": ["0/0", "16/B374D848", "16/b374d848"],
}  # fmt: skip
"""Values of each accepted type. Some of them are equal although they are written differently."""
REFUSED = {
    "real": "such as 0 and -0",
    "double precision": "such as 0 and -0",
    "interval": "such as 1 day and 24:00:00",
    "jsonb": "such as 1 and 1.0",
    "money": "depends on a setting",
    "timetz": "a key cannot have this type",
    "integer[]": "a key cannot have this type",
    "int4range": "a key cannot have this type",
    "int4multirange": "a key cannot have this type",
    "pair": "a key cannot have this type",
    "tsvector": "a key cannot have this type",
    '"char"': "a key cannot have this type",
    "regclass": "a key cannot have this type",
}
COLUMNS = {kind: f"c{place}" for place, kind in enumerate([*TAKEN, *REFUSED])}
ODD = "set timezone = 'Asia/Kolkata'; set datestyle = 'German'; set bytea_output = 'escape'; set extra_float_digits = 0"


@pytest.fixture
def forty(connection):
    """A table with columns of many types, none of which may be null."""
    made = ", ".join(f"{name} {kind} not null" for kind, name in COLUMNS.items())
    connection.execute(f"{DDL} create table forty ({made}); {ODD}")
    return connection


def test_each_of_forty_types_is_taken_or_refused_with_the_reason(forty):
    assert len(COLUMNS) >= 40
    forty.execute("alter table forty " + ", ".join(f"add unique ({name})" for name in COLUMNS.values()))
    query = "select u.name, pgchange.key_trouble('forty', array[u.name]::name[]) from unnest(%s::text[]) as u(name)"
    told = dict(forty.execute(query, [list(COLUMNS.values())]).fetchall())
    assert {kind: told[COLUMNS[kind]] for kind in TAKEN} == dict.fromkeys(TAKEN)
    for kind, reason in REFUSED.items():
        assert told[COLUMNS[kind]].startswith(f"column {COLUMNS[kind]} of public.forty is "), told
        assert reason in told[COLUMNS[kind]], told


def test_two_values_of_a_type_have_one_text_if_they_are_equal_and_each_is_read_back(forty):
    """The result does not depend on the settings of the sessions that write and read."""
    for kind, name in COLUMNS.items():
        if kind not in TAKEN:
            continue
        query = one(forty, "select pgchange.key_text('forty'::regclass, %s::name[], 'k')", [name])
        types = one(forty, "select pgchange.key_types('forty', %s::name[])::text[]", [name])
        settings = one(forty, "select pgchange.key_settings(%s::regtype[])", types)
        forty.execute(
            f"create table s_{name} ({name} {kind}); create function k_{name}(k s_{name}) returns text language sql "
            f"{settings} as $$ select ({query})::text $$"
        )
        with forty.cursor() as cursor:
            cursor.executemany(f"insert into s_{name} values (%s)", [(each,) for each in TAKEN[kind]])
        sent = f"(select k.{name} as v, k_{name}(k) as t from s_{name} as k)"
        wrong = f'select count(*) from {sent} as a, {sent} as b where (a.v = b.v) <> (a.t collate "C" = b.t collate "C")'
        assert one(forty, wrong) == 0, kind
        assert one(forty, f"select count(*) from {sent} as a where a.t::{kind} is distinct from a.v") == 0, (
            kind
        )
        keys = [key for (key,) in forty.execute(f"select t from {sent} as a").fetchall()]
        for key in keys:
            held = value(int(key) if types == ["bigint"] else key, types)
            assert text(held) == key
            assert found(forty, name, types, key) == keys.count(key), (kind, key)
        held = HeldIds.of(forty, f"s_{name}", [name], types)
        assert sorted(str(id_) for ids in held.pages(TRUE) for id_ in ids) == sorted(set(keys)), kind


def test_the_text_of_a_key_of_two_columns_is_that_of_an_array(forty):
    """The text is that of an array even if the parts of the key are texts that need no quotes."""
    query = "select pgchange.key_text(array_fill(pgchange.key_type(%s::regtype), array[%s]), %s::name[], 'k')"
    for kind, given in TAKEN.items():
        forty.execute(f"create temporary table k (x {kind})")
        forty.execute(f"insert into k select v::{kind} from unnest(%s::text[]) as given(v)", [given])
        single, pair = (one(forty, query, kind, len(columns), columns) for columns in (["x"], ["x", "x"]))
        other = f"({pair})::text is distinct from array[({single})::text, ({single})::text]::text"
        assert one(forty, f"select count(*) from k where {other}") == 0, kind
        forty.execute("drop table k")


def test_a_key_of_all_the_types_that_are_taken_goes_through_the_commit_queue_and_finds_its_row(forty, db):
    columns = [COLUMNS[kind] for kind in TAKEN]
    made = ", ".join(f"{COLUMNS[kind]} {kind}" for kind in TAKEN)
    forty.execute(f"create table wide ({made}, primary key ({', '.join(columns)}))")
    feed = CommitFeed("c", one(forty, "select revision.track('wide')"))
    forty.execute(
        f"insert into wide values ({', '.join(['%s'] * len(TAKEN))})", [each[0] for each in TAKEN.values()]
    )
    with ConsumerTransaction(feed, db) as consumer:
        batch = consumer.claim(10)
        assert batch is not None
        [change] = consumer.changes()
        keyed = key_columns(forty, "wide", columns, batch.key)
        rows = current_rows(partitions(feed, batch, 1)[0], "wide", keyed, named=True)
        query = f"select q.pgchange_id, num_nulls({', '.join(columns)}) from ({rows.query}) as q"
        [(id_, lacking)] = forty.execute(query).fetchall()
        consumer.ack(None)
    assert isinstance(change.id, tuple)
    assert id_ == [str(part) for part in change.id]
    assert lacking == 0


def found(connection, name, types, key):
    """Return the number of rows that a reader of changes finds by a key."""
    columns = key_columns(connection, f"s_{name}", [name], types)
    id_ = sql.SQL("{}::bigint" if types == ["bigint"] else "{}::text").format(key).as_string(None)
    query = sql.SQL("select count(*) from {} as t where {}")
    return one(connection, query.format(sql.Identifier(f"s_{name}"), found_by("t", columns, parts(id_, 1))))
