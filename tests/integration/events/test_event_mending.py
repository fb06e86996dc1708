"""Repairing the capture of mutations of many tables: a table that cannot be repaired does not hinder the others."""

from __future__ import annotations

import threading

import pytest

from airflow_pgchange.admin import schema
from airflow_pgchange.admin.maintenance import Report, maintain
from tests.mutations import events, push, serialise
from tests.tubes import one
from tests.waiting import until, waits


@pytest.fixture
def broken(connect):
    """A table that cannot be repaired because it now has a foreign child, and a table with a new partition."""
    connection = connect()
    connection.execute("create table item (id bigint not null)")
    connection.execute("create table whole (id bigint not null) partition by range (id)")
    push(connection, "item")
    push(connection, "whole")
    connection.execute(
        "create foreign data wrapper nothing; create server elsewhere foreign data wrapper nothing; "
        "create foreign table leaf () inherits (item) server elsewhere; select pgmb.recapture()"
    )
    connection.execute("create table low partition of whole for values from (0) to (10)")
    return connection


def test_a_table_that_cannot_be_mended_is_told_and_the_others_are_mended(broken):
    lines = sorted(line for (line,) in broken.execute("select pgmb.recapture()").fetchall())
    assert "public.item: the capture of its mutations cannot be repaired: " in lines[0]
    assert lines[1:] == ["public.whole: the capture of its mutations was repaired"]
    broken.execute("insert into low values (1)")
    assert [topic for topic, _, _ in events(broken)] == ["public.whole.insert"]


def test_maintenance_names_a_table_that_cannot_be_mended_and_mends_the_others(broken):
    report = maintain(broken)
    assert any(
        "public.item: the capture of its mutations cannot be repaired: " in line for line in report.attention
    )
    assert "public.whole: the capture of its mutations was repaired" in report.done
    assert report.failed == []


@pytest.mark.parametrize("written", ["a", "b"])
def test_maintenance_that_waits_for_the_writers_of_a_table_holds_up_those_of_no_other(connect, written):
    connection = connect()
    for name in ("a", "b"):
        connection.execute(f"create table {name} (id bigint)")
        push(connection, name)
        connection.execute(f"alter table {name} rename to {name}_new")
    writer, maintaining = connect(autocommit=False), connect()
    writer.execute(f"insert into {written}_new values (1)")
    reports = []
    thread = threading.Thread(target=lambda: reports.append(maintain(maintaining)))
    thread.start()
    until(connection, waits(maintaining, behind=writer))
    connection.execute("set lock_timeout = '1s'")
    connection.execute(f"insert into {'b' if written == 'a' else 'a'}_new values (1)")
    writer.commit()
    thread.join()
    assert sum("was repaired" in line for line in reports[0].done) == 2


@pytest.mark.parametrize("look_after", [maintain, lambda c: c.execute("select pgmb.maintain_events_table()")])
def test_a_table_that_was_dropped_is_forgotten_before_a_dump_gives_its_number_to_another(connect, look_after):
    connection = connect()
    connection.execute("create table item (id bigint)")
    push(connection)
    connection.execute(
        "insert into pgmb.push_fault (tbl, op, message) values ('item'::regclass, 'INSERT', '')"
    )
    connection.execute("alter table item rename to thing; select pgmb.recapture(); drop table thing")
    told = look_after(connection)
    lines = told.done if isinstance(told, Report) else [line for (line,) in told.fetchall()]
    again = "if another table has taken its place: select pgmb.push_table_mutations('public.thing')"
    assert f"public.thing was dropped, so its mutations are no longer published; {again}" in lines
    assert one(connection, "select count(*) from pgmb.pushed_table") == 0
    assert one(connection, "select count(*) from pgmb.push_fault") == 0


def functions(connection):
    """Return our functions that capture tables, and other functions with such names."""
    query = "select proname from pg_proc where proname like 'pgchange\\_push\\_%' order by 1"
    return [name for (name,) in connection.execute(query)]


@pytest.mark.parametrize(
    "look_after",
    [
        maintain,
        lambda connection: connection.execute("select pgmb.maintain_events_table()"),
        lambda connection: schema.uninstall(connection, ["pgmb"]),
    ],
    ids=["maintain", "by hand", "uninstall"],
)
def test_only_the_capture_functions_of_dropped_tables_are_dropped(connect, look_after):
    connection = connect()
    connection.execute("create table item (id bigint); create table gone (id bigint)")
    push(connection)
    push(connection, "gone")
    kept = [name for name in functions(connection) if "item" in name]
    connection.execute(
        "drop table gone; create function pgchange_push_mine() returns trigger language plpgsql as 'begin end'"
    )
    assert len(functions(connection)) == 7
    look_after(connection)
    if one(connection, "select to_regclass('pgmb.events') is null"):
        assert functions(connection) == ["pgchange_push_mine"]
    else:
        assert functions(connection) == sorted([*kept, "pgchange_push_mine"])
        connection.execute("insert into item values (1)")
        assert [topic for topic, _, _ in events(connection)] == ["public.item.insert"]


SETTINGS = (
    "set timezone = 'Asia/Tokyo'; set lc_monetary = 'C.UTF-8'; set quote_all_identifiers = on; "
    "set intervalstyle = iso_8601; set datestyle = german; set bytea_output = escape; set extra_float_digits = -3"
)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_row_says_the_same_in_the_sessions_of_all(connect, replayed):
    said = []
    connection = connect()
    connection.execute(
        "create table item (id int, t timestamptz, r regclass, i interval, b bytea, f float, m money)"
    )
    push(connection)
    for settings in ("set timezone = 'UTC'", SETTINGS):
        session = connect()
        session.execute(settings)
        if replayed:
            serialise(connection, "raise 'not now';")
        session.execute(
            "insert into item values (1, '2020-01-01 00:00:00+00', 'item', '1 day', '\\x01', 0.1::float + 0.2, 1.5)"
        )
        if replayed:
            serialise(connection, "serialised := pg_catalog.to_jsonb(record); emit := true;")
            assert one(session, "select pgmb.replay_push_faults('item')") == 1
        said += events(connection)
    assert said[0] == said[1]
    assert said[0][1]["t"] == "2020-01-01T00:00:00+00:00"


def test_a_row_that_no_event_can_hold_is_kept_as_a_text(connect):
    connection = connect()
    connection.execute("create table item (id int primary key, doc json)")
    connection.execute("select pgmb.push_table_mutations('item')")
    connection.execute(r"""insert into item values (1, '{"a": "x\u0000y"}')""")
    assert r'{"id":1,"doc":{"a": "x\u0000y"}}' in one(connection, "select message from pgmb.push_fault")
