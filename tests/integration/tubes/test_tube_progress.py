"""The notices of a backfill and of a touch of many ids, in the words that existing clients parse."""

from __future__ import annotations

import re

import psycopg
import pytest

from tests.tubes import make, make_items, one, touched


@pytest.fixture
def told(connect):
    """A connection to a database with a table of 1,000 rows in a tube, and the notices.

    Each notice is a tuple: the name of the function, the pairs of name and value, and the whole line.
    """
    connection = connect()
    make_items(connection)
    lines = []

    def note(diagnostic):
        line = diagnostic.message_primary
        who, _, said = line.partition(": ")
        lines.append((who, dict(re.findall(r"(\w+)=(\S+)", said)), line))

    connection.add_notice_handler(note)
    return connection, lines


def test_a_touch_of_many_ids_ends_with_how_many_there_were(told):
    connection, lines = told
    connection.execute(
        "select tube.tube_pods_insert('q', 'select id, row_number() over () from item', 0, 'T', 2000, 300)"
    )
    who, pairs, _ = lines[-1]
    assert who == "tube_pods_insert"
    assert list(pairs) == [
        "approx_size", "fetch_ms", "insert_ids", "insert_finished", "insert_percent", "insert_ms", "insert_rps",
    ]  # fmt: skip
    assert (pairs["approx_size"], pairs["insert_ids"], pairs["insert_finished"]) == ("2000", "1000", "t")
    assert pairs["insert_percent"] == "100"
    assert all(pairs[key].isdigit() for key in ("fetch_ms", "insert_ms", "insert_rps"))


def test_the_ids_that_are_told_are_those_touched_in_all_tubes_but_without_nulls(told):
    connection, lines = told
    make(connection, "r")
    connection.execute("select tube.tube_pods_insert('q,r', 'values (7, 1), (null, 2), (8, 3)', 0)")
    assert lines[-1][1]["insert_ids"] == "2"
    assert lines[-1][1]["approx_size"] == "<NULL>"
    connection.execute("select tube.tube_pods_insert('q', 'select 1, 1 where false', 0)")
    assert lines[-1][1]["insert_ids"] == "0"


def test_step_2_tells_whom_it_waits_for(told, connect):
    connection, lines = told
    writer = connect(autocommit=False)
    writer.execute("update item set kind = 'b' where id = 1")
    xid = one(writer, "select pg_current_xact_id()::xid::text")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        connection.execute("select tube.tube_backfill_step2('0 seconds')")
    [(who, pairs, line)] = lines
    assert who == "tube_backfill"
    assert pairs["await_ms"].isdigit()
    assert pairs["active_tx_xid"] == xid
    assert re.fullmatch(r"\d+:\d\d:\d\d\.?\d*", pairs["active_tx_duration"])
    assert f"process {writer.info.backend_pid}" in line


def test_step_2_tells_of_a_prepared_transaction_and_of_nobody_where_nobody_writes(told):
    connection, lines = told
    connection.execute("select tube.tube_backfill_step2()")
    assert lines == []
    connection.execute("begin")
    connection.execute("update item set kind = 'b' where id = 1")
    xid = one(connection, "select pg_current_xact_id()::xid::text")
    connection.execute("prepare transaction 'tube-told'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        connection.execute("select tube.tube_backfill_step2('0 seconds')")
    connection.execute("rollback prepared 'tube-told'")
    assert lines[-1][1]["active_tx_xid"] == xid
    assert lines[-1][1]["active_tx_duration"] != "<NULL>"


def test_step_3_tells_its_size_and_how_many_ids_it_put(told):
    connection, lines = told
    connection.execute("analyze item")
    step1 = one(connection, "select tube.tube_backfill_step1()")
    connection.execute("select tube.tube_backfill_step3(%s, 'q', 'item', 'day', null, 300)", [step1])
    assert lines[0][0] == "tube_backfill"
    assert lines[0][1]["approx_size"] == "1000"
    who, pairs, _ = lines[-1]
    assert (who, pairs["insert_ids"], pairs["insert_finished"]) == ("tube_pods_insert", "1000", "t")
    assert len(touched(connection)) == 1000
    lines.clear()
    connection.execute("select tube.tube_backfill_step3(%s, 'q', 'item', 'day')", [step1])
    [(who, _, line)] = lines
    assert who == "tube_backfill"
    assert "skipped" in line
