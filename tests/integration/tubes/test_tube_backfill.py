"""A backfill puts a whole table into pods, in order, by steps or chunks. The sessions for which it waits."""

from __future__ import annotations

import pytest

from tests.tubes import (
    ITEMS_IN_ORDER,
    attach,
    begin,
    chunk,
    controls,
    faults,
    ids_in_order,
    make,
    one,
    run,
    steps,
    touched,
)

WAYS = pytest.mark.parametrize(
    "way", [steps, lambda connection: run(connection, begin(connection))], ids=["steps", "chunks"]
)


@WAYS
def test_every_id_comes_once_in_the_order_of_the_column_and_those_without_last(item, way):
    way(item)
    assert ids_in_order(item) == [row[0] for row in item.execute(ITEMS_IN_ORDER)]


@WAYS
def test_it_begins_and_ends_with_a_control_pod_that_names_table_and_start(item, way):
    way(item)
    start = controls(item)[0][2]["start_seq"]
    named = {"tbl": "public.item", "start_seq": start}
    assert controls(item) == [
        ("T", 0, {"type": "backfill_start", **named}),
        ("B", 0, {"type": "backfill_end", **named}),
    ]
    assert int(start) < one(item, "select min(seq) from q")


@pytest.mark.parametrize(
    "way",
    [
        lambda connection: steps(connection, "part", fetch=99),
        lambda connection: run(connection, begin(connection, "part", chunk_size=99)),
    ],
    ids=["steps", "chunks"],
)
def test_an_id_that_several_rows_share_is_touched_where_any_of_them_is_wanted(connect, way):
    item = connect()
    item.execute(
        "create table part (id bigint not null, day date, wanted boolean); create index on part (day, id)"
    )
    item.execute("insert into part select g / 2, '2024-01-01', g % 2 = 1 from generate_series(0, 999) as g")
    make(item, predicate="wanted")
    attach(item, "part", group_by=["id"])
    way(item)
    assert touched(item) == list(range(500))


@WAYS
def test_the_predicate_applies(item, way):
    make(item, predicate="id % 3 = 0")
    way(item)
    assert touched(item) == list(range(3, 1001, 3))


@WAYS
def test_a_row_for_which_the_predicate_fails_is_touched_and_counted(item, way):
    make(item, predicate="1 / (id - 500) > 0 or id % 2 = 0 or id = 499")
    way(item)
    assert touched(item) == sorted({*range(2, 1001, 2), 499, 501})
    assert faults(item) == [(1, "division by zero")]


KINDS = {
    "bigint": "(g * 7919) % 97",
    "text": "'%' || (g * 7919) % 97 || E'''\\\\'",
    "timestamptz": "timestamptz '2024-03-30 23:00+00' + g * interval '77 minutes'",
    "interval": "(g % 77) * interval '1 day 1 hour'",
    "double precision": "case when g % 7 = 0 then 'NaN' else (1.0 / g)::text end::double precision",
    "numeric(20, 3)": "1000.0 / g",
    "uuid": "md5(g::text)::uuid",
    "boolean": "g % 2 = 0",
    "character(5)": "(g % 50)::text",
}


def test_chunks_follow_the_order_of_any_type(connect):
    connection = connect()
    connection.execute(
        "set datestyle = 'SQL, DMY'; set timezone = 'Europe/Berlin'; set extra_float_digits = -5"
    )
    columns = ", ".join(f"c{number} {kind}" for number, kind in enumerate(KINDS))
    values = ", ".join(f"case when g % 10 > 0 then {value} end" for value in KINDS.values())
    connection.execute(f"create table item (id int primary key, {columns})")
    connection.execute(f"insert into item select g, {values} from generate_series(1, 500) as g")
    make(connection)
    attach(connection)
    for number, kind in enumerate(KINDS):
        run(connection, begin(connection, order_col=f"c{number}", chunk_size=37))
        expected = connection.execute(f"select id from item order by c{number}, id").fetchall()
        assert ids_in_order(connection) == [row[0] for row in expected], kind
        connection.execute("delete from q")


def test_the_ids_themselves_may_be_the_order(item):
    run(item, begin(item, order_col="id", chunk_size=333))
    assert ids_in_order(item) == list(range(1, 1001))


def test_a_partitioned_table_is_filled_whole(connect):
    connection = connect()
    connection.execute("create table item (id int, day int, primary key (id, day)) partition by range (id)")
    connection.execute("create table p1 partition of item for values from (1) to (60)")
    connection.execute("create table p2 partition of item for values from (60) to (200)")
    connection.execute("create index on item (day, id)")
    connection.execute("insert into item select g, (g * 7) % 13 from generate_series(1, 150) as g")
    make(connection)
    attach(connection, group_by=["id"])
    run(connection, begin(connection, chunk_size=20))
    assert ids_in_order(connection) == [row[0] for row in connection.execute(ITEMS_IN_ORDER)]


def test_an_empty_table_has_its_end(connect):
    connection = connect()
    connection.execute("create table item (id int primary key, day int)")
    make(connection)
    attach(connection)
    run(connection, begin(connection))
    assert [payload["type"] for _, _, payload in controls(connection)] == ["backfill_start", "backfill_end"]


def test_without_an_index_it_says_so_and_with_one_it_uses_it(item):
    notices = []
    item.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    number = begin(item)
    assert notices == []
    item.execute("select tube.backfill_cancel(%s)", [number])
    begin(item, order_col="kind")
    assert "create index on public.item (kind, id)" in notices[0]


def test_a_chunk_reads_no_more_than_itself(connect):
    connection = connect()
    connection.execute("create table item (id int primary key, day int)")
    connection.execute("insert into item select g, g / 10 from generate_series(1, 50000) as g")
    connection.execute("create index on item (day, id)")
    connection.execute("vacuum analyze item")
    make(connection)
    attach(connection)
    number = begin(connection, chunk_size=100)
    for _ in range(3):
        chunk(connection, number)

    def read():
        connection.execute("select pg_stat_force_next_flush()")
        query = "select idx_tup_fetch + seq_tup_read from pg_stat_user_tables where relname = 'item'"
        return one(connection, query)

    before = read()
    chunk(connection, number)
    assert read() - before <= 200


def test_scheduling_asks_for_each_table_once(item):
    item.execute("create schema sh0002")
    item.execute("create table sh0002.item (id bigint primary key, day date)")
    attach(item, "sh0002.item", shard=None)
    item.execute("create table other (id bigint primary key, day date)")
    attach(item, "other", shard=9)
    call = "select tube.tube_backfill_schedule('q', 'day', 0, 2)"
    assert one(item, call) == 2
    assert one(item, call) == 0
    asked = {"type": "backfill_schedule", "order_col": "day"}
    assert controls(item) == [
        ("B", 0, {**asked, "tbl": "public.item"}),
        ("B", 2, {**asked, "tbl": "sh0002.item"}),
    ]
