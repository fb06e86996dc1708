"""Rows that were in a table when it became a partition are in no pod. Health reports them until a backfill has touched
them."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin.maintenance import maintain
from tests.findings import findings
from tests.partitioned import come
from tests.tubes import attach, begin, drain, make, one, run, touched

SCHEDULE = "select tube.tube_backfill_schedule('q', 'id', 3, 3)"


def make_item(connection):
    """A connection to a database with an attached table.

    The table has no rows except a row in one of its partitions, which was touched.
    """
    connection.execute(
        "create table item (id bigint primary key) partition by range (id);"
        "create table low partition of item for values from (0) to (10);"
        "create table high (id bigint primary key)"
    )
    make(connection)
    attach(connection, shard=3)
    connection.execute("insert into item values (1)")
    assert drain(connection) == [1]


@pytest.fixture
def prepared_item():
    return make_item


def refresh(item):
    return [line for (line,) in item.execute("select tube.recapture()")]


def troubles(item):
    return findings(item, "tube")


def faults(item):
    return one(item, "select faults from tube.status()")


MENDED = "public.item: its capture for tube q was repaired"
CAME = "public.item: rows of public.high may have been there before it was captured, and are not in tube q"


def test_rows_that_came_with_a_partition_are_told_with_the_call_that_brings_them(item):
    told = []
    item.add_notice_handler(lambda notice: told.append((notice.message_primary, notice.message_hint)))
    come(item)
    lines = refresh(item)
    assert lines[0] == MENDED
    assert lines[1].startswith(CAME)
    assert SCHEDULE in lines[1]
    assert lines == [MENDED, *troubles(item)]
    [(message, hint)] = told
    assert message == CAME
    assert SCHEDULE in hint
    assert one(item, "select missed from tube.attachments()") == 1
    assert faults(item) == 1
    assert refresh(item) == []
    assert troubles(item) == lines[1:]


def test_maintenance_says_what_came_with_a_partition(item):
    come(item)
    report = maintain(item)
    assert MENDED in report.done
    assert [line for line in report.attention if line.startswith(CAME)] == report.attention
    assert SCHEDULE in report.attention[0]


def test_a_partition_that_comes_empty_misses_nothing(item):
    come(item, rows=None)
    assert refresh(item) == [MENDED]
    assert (troubles(item), faults(item)) == ([], 0)


def test_a_backfill_brings_what_came_and_it_is_told_no_more(item):
    come(item)
    refresh(item)
    run(item, begin(item, order_col="id"))
    assert (troubles(item), faults(item)) == ([], 0)
    assert touched(item) == [1, 11, 12]


def test_a_backfill_in_steps_brings_it_as_well(item):
    come(item)
    refresh(item)
    item.execute("select tube.tube_backfill_step3(tube.tube_backfill_step1(), 'q', 'item', 'id')")
    assert (troubles(item), touched(item)) == ([], [1, 11, 12])


def test_a_backfill_that_was_begun_before_may_have_passed_it(item):
    earlier = begin(item, order_col="id")
    come(item)
    [_, told] = refresh(item)
    run(item, earlier)
    assert troubles(item) == [told]


def test_of_a_tree_that_came_its_root_is_told(item):
    item.execute(
        "create table tree (id bigint primary key) partition by range (id);"
        "create table leaf partition of tree for values from (20) to (25); insert into tree values (20);"
        "alter table item attach partition tree for values from (20) to (30)"
    )
    assert [line for line in refresh(item) if "rows of" in line] == troubles(item)
    [told] = troubles(item)
    assert "rows of public.tree may" in told


def test_rows_that_were_there_when_the_table_was_attached_are_its_owners_to_bring(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key); insert into item values (1)")
    make(connection)
    attach(connection)
    attach(connection)
    assert troubles(connection) == []
