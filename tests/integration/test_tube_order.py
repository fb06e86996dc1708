"""The order of a backfill: no row is missed for what its column holds, or for what becomes of it meanwhile."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange import tubes
from airflow_pgchange.feeds.errors import Refused
from tests.tubes import attach, begin, chunk, ids_in_order, make, make_items, one, run, steps, touched


@pytest.fixture
def item(connect):
    connection = connect()
    make_items(connection)
    return connection


@pytest.mark.parametrize("kind", ["pair", "checked_pair"])
def test_a_column_of_a_row_type_is_refused_as_an_order(connect, kind):
    """A value that is partly null is neither null nor not null."""
    connection = connect()
    connection.execute(
        "create type pair as (a int, b text); create domain checked_pair as pair;"
        f"create table item (id bigint primary key, day {kind})"
    )
    make(connection)
    attach(connection)
    for way in (begin, steps):
        with pytest.raises(psycopg.Error, match="is a composite"):
            way(connection)


CHANGES = {
    "alter table item alter day type text using (id * 7919 % 1000)::text": "was date and is text",
    "alter table item alter day type timestamp": "was date and is timestamp",
    "alter table item rename day to date": "column day is gone, or renamed",
    "alter table item drop column day": "column day is gone, or renamed",
    "alter table item drop column id": "the column of its ids is gone",
    "drop table item": "the table is gone",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_backfill_goes_by_is_changed_and_it_fails_with_the_reason(item, change):
    number = begin(item)
    chunk(item, number)
    item.execute(change)
    with pytest.raises(Refused, match=CHANGES[change]):
        next(progress for progress in tubes.chunks(item, number) if progress.finished)
    assert one(item, "select state from tube.backfills()") == "failed"
    assert len(touched(item)) == 100


def test_a_column_whose_collation_is_changed_has_another_order(item):
    number = begin(item, order_col="kind")
    chunk(item, number)
    item.execute('alter table item alter kind type text collate "C"')
    assert chunk(item, number)[3:] == (False, "failed")


def test_a_table_whose_backfill_failed_can_be_backfilled_anew(item):
    number = begin(item)
    chunk(item, number)
    item.execute("alter table item rename day to date")
    chunk(item, number)
    tubes.backfill(item, "q", "public.item", "date")
    assert set(touched(item)) == set(range(1, 1001))


@pytest.mark.parametrize("way", ["steps", "chunks"])
def test_rows_without_an_order_in_an_inheritance_child_are_not_missed(connect, way):
    connection = connect()
    connection.execute("create table item (id bigint primary key, day int)")
    connection.execute("create table child () inherits (item)")
    connection.execute("alter table only item add constraint filled check (day is not null) no inherit")
    connection.execute("insert into item values (1, 1); insert into child values (2, null), (3, 3)")
    if one(connection, "select current_setting('server_version_num')::int < 180000"):
        connection.execute("alter table only item alter day set not null")
    make(connection)
    attach(connection)
    if way == "steps":
        steps(connection)
    else:
        run(connection, begin(connection))
    assert touched(connection) == [1, 2, 3]


@pytest.mark.parametrize("way", ["steps", "chunks"])
def test_the_lowest_id_without_an_order_is_not_missed(connect, way):
    connection = connect()
    connection.execute("create table item (id bigint primary key, day int)")
    connection.execute("insert into item values (-9223372036854775808, null), (1, null), (2, 1)")
    make(connection)
    attach(connection)
    if way == "steps":
        steps(connection)
    else:
        run(connection, begin(connection, chunk_size=1))
    assert ids_in_order(connection) == [2, -9223372036854775808, 1]


def test_an_index_on_the_order_alone_is_not_enough_and_it_says_so(item):
    item.execute("create index on item (kind)")
    notices = []
    item.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    number = begin(item, order_col="kind")
    assert "create index on public.item (kind, id)" in notices[0]
    item.execute("select tube.backfill_cancel(%s)", [number])
    item.execute("create index on item (kind, id)")
    begin(item, order_col="kind")
    begin(item, order_col="kind")
    assert len(notices) == 1


@pytest.mark.parametrize("way", ["chunks", "steps"])
def test_a_role_whose_transactions_are_repeatable_read_by_default_can_backfill(item, connect, way):
    session = connect()
    session.execute("set default_transaction_isolation = 'repeatable read'")
    run_it = tubes.backfill_in_steps if way == "steps" else tubes.backfill
    run_it(session, "q", "public.item", "day")
    assert set(touched(item)) == set(range(1, 1001))
