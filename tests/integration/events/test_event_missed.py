"""Rows that were in a table when it became a partition have no events. Health reports them until they are published."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin.maintenance import maintain
from tests.findings import findings
from tests.mutations import events, faults, push, serialise, stop
from tests.partitioned import come
from tests.tubes import one

BRING = "select pgmb.publish_attached('public.high')"
CAME = (
    "public.item: rows of public.high may have been there before it was captured, and are in no event; "
    f"as its owner: {BRING}"
)
MENDED = "public.item: the capture of its mutations was repaired"


def make(connection, **options):
    connection.execute(
        "create table item (id int primary key) partition by range (id);"
        "create table low partition of item for values from (0) to (10);"
        "create table high (id int primary key)"
    )
    push(connection, **options)
    return connection


@pytest.fixture
def item(connect):
    """A connection to a database with a partitioned table whose mutations are events."""
    return make(connect())


def refresh(item):
    return [line for (line,) in item.execute("select pgmb.recapture()")]


def troubles(item):
    return findings(item, "pgmb")


@pytest.mark.parametrize("mend", ["select pgmb.recapture()", "select pgmb.push_table_mutations('item')"])
def test_rows_that_came_with_a_partition_are_told_with_the_call_that_publishes_them(item, mend):
    told = []
    item.add_notice_handler(lambda notice: told.append(f"{notice.message_primary}; {notice.message_hint}"))
    come(item)
    item.execute(mend)
    assert told == [CAME]
    assert troubles(item) == [CAME]
    assert one(item, "select missed::text from pgmb.pushing()") == "{high}"


def test_repair_and_maintenance_report_rows_that_came_with_a_partition(item):
    come(item)
    assert refresh(item) == [MENDED, CAME]
    assert refresh(item) == []
    assert maintain(item).attention == [CAME]


@pytest.mark.parametrize(
    ("options", "rows"), [({}, None), ({"insert": False}, "(11)")], ids=["empty", "no inserts"]
)
def test_where_no_event_is_missed_nothing_is_told(connect, options, rows):
    item = make(connect(), **options)
    come(item, rows)
    assert refresh(item) == [MENDED]
    assert troubles(item) == []


def test_rows_that_came_with_a_partition_are_published_as_inserts_and_no_finding_any_more(item):
    come(item)
    refresh(item)
    assert one(item, BRING) == 2
    assert events(item) == [("public.item.insert", {"id": n}, {}) for n in (11, 12)]
    assert troubles(item) == []
    assert one(item, BRING) == 0
    assert events(item) == []


def test_rows_of_a_partition_that_is_published_itself_have_its_topic(item):
    item.execute("insert into high (id) values (11)")
    push(item, "high")
    come(item, None)
    refresh(item)
    assert one(item, BRING) == 1
    assert [topic for topic, _, _ in events(item)] == ["public.high.insert"]


def test_rows_that_came_with_another_partition_stay_a_finding(item):
    come(item)
    item.execute(
        "create table higher (id int primary key); insert into higher values (21);"
        "alter table item attach partition higher for values from (20) to (30)"
    )
    refresh(item)
    assert one(item, BRING) == 2
    assert one(item, "select missed::text from pgmb.pushing()") == "{higher}"


def test_a_row_that_can_be_no_event_is_a_fault(item):
    come(item, "(11)")
    refresh(item)
    serialise(item, "serialised := 1 / 0;")
    assert one(item, BRING) == 0
    assert faults(item) == [("INSERT", "division by zero", None, {"id": 11})]


def test_a_table_that_is_no_longer_published_has_no_missed_rows(item):
    come(item)
    refresh(item)
    stop(item)
    push(item)
    assert troubles(item) == []


def test_publishing_rows_of_a_table_that_is_not_published_is_refused(item):
    item.execute("create table other (id int)")
    with pytest.raises(psycopg.Error, match="other is not a part of a table whose inserts are published"):
        item.execute("select pgmb.publish_attached('other')")


def test_only_the_owner_publishes_what_came(item, role, connect_to):
    come(item)
    refresh(item)
    who = role("stranger")
    item.execute(f"select pgmb.grant_owner('{who.name}'); grant select on high to {who.name}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="rights of its owner, postgres"):
        connect_to(who.conninfo).execute(BRING)
