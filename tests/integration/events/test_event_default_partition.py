"""The default partition of the event log: its rows are moved or given back, and it is not read if others would have to
wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.event_keeping import (
    contiguous,
    dispatch,
    drop_all,
    fill_default,
    kept,
    lines,
    maintain,
    partitions,
    place,
    publish,
)
from tests.limits import be_patient
from tests.tubes import one
from tests.waiting import until, waits

DEFAULT = "select count(*) from pgmb.events_default"
LATER = "select count(*) from pgmb.later"


SIZE = "select pg_table_size('pgmb.events_default')"


def test_a_default_partition_from_which_all_is_gone_gives_back_its_room(connect):
    connection = connect()
    fill_default(connection, 300, "now() - interval '1 day'")
    dispatch(connection)
    assert one(connection, SIZE) > 2**20
    assert any("deleted 300 rows" in line for line in maintain(connection))
    assert one(connection, SIZE) < 2**14


def test_a_default_partition_gives_back_its_room_later_where_somebody_was_at_work_there(connect):
    connection, reader = connect(), connect(autocommit=False)
    fill_default(connection, 300, "now() - interval '1 day'")
    dispatch(connection)
    reader.execute("select from pgmb.events_default limit 0")
    assert any("deleted 300 rows" in line for line in maintain(connection))
    assert one(connection, SIZE) > 2**20
    reader.rollback()
    maintain(connection)
    assert one(connection, SIZE) < 2**14


def test_an_event_that_is_committed_while_a_default_partition_gives_back_its_room_stays(connect):
    connection, publisher = connect(), connect(autocommit=False)
    be_patient(connection)
    fill_default(connection, 200, at="now() - interval '5 days'")
    dispatch(connection)
    late = publish(publisher, at="now() - interval '5 days'")
    with ThreadPoolExecutor() as threads:
        told = threads.submit(lines, connect(), "select pgmb.trim_partitions('pgmb.events')")
        until(connection, waits(behind=publisher, relation="pgmb.events_default"))
        publisher.commit()
        assert any("deleted 200 rows" in line for line in told.result())
    assert kept(connection) == late


def test_dispatched_events_count_as_present_whatever_the_clock_says(connect):
    connection = connect()
    drop_all(connection)
    connection.execute(
        "update pgmb.dispatcher set last_id = pgmb.create_event_id(now() + interval '1 day', 0)"
    )
    publish(connection, 10, at="now() + interval '23 hours'")
    lines(connection, "select pgmb.make_partitions('pgmb.events', now() + interval '2 days')")
    assert partitions(connection)[0][1] >= one(connection, "select now() + interval '1 day'")
    assert one(connection, DEFAULT) == 10


def test_an_event_that_is_to_come_is_moved_beside_those_of_the_present(connect):
    connection = connect()
    drop_all(connection)
    expected = publish(connection, 2)
    expected += publish(connection, 3, at="now() + interval '1 hour'")
    assert lines(connection, "select pgmb.make_partitions('pgmb.events')")
    place(connection)
    assert (one(connection, DEFAULT), one(connection, LATER)) == (2, 0)
    assert kept(connection) == expected


def test_a_partition_into_which_somebody_was_quicker_is_refused(connect):
    connection = connect()
    drop_all(connection)
    lower, upper = connection.execute("select now() - interval '1 hour', now()").fetchone()
    connection.execute("select pgmb.prepare_partition('pgmb.events', tstzrange(%s, %s))", [lower, upper])
    publish(connection, at="now() - interval '1 minute'")
    with pytest.raises(psycopg.errors.ObjectInUse, match="has rows"):
        connection.execute(
            "select pgmb.attach_partitions('pgmb.events', array[tstzrange(%s, %s)])", [lower, upper]
        )
    assert partitions(connection) == []
    assert one(connection, DEFAULT) == 1


def test_a_default_partition_that_has_grown_is_not_read_before_somebody_says_so(connect):
    connection = connect()
    drop_all(connection)
    fill_default(connection, 3000, "now()")
    before = kept(connection)
    (told,) = lines(connection, "select pgmb.make_partitions('pgmb.events')")
    assert "stop_publishers => true" in told
    assert partitions(connection) == []
    assert lines(connection, "select pgmb.make_partitions('pgmb.events', stop_publishers => true)")
    assert contiguous(connection)
    assert partitions(connection)
    assert kept(connection) == before


def test_a_default_partition_that_has_grown_is_not_read_beside_a_partition_of_the_present_either(connect):
    """If the partition were read, readers would have to wait, and so would publishers of events for times without a
    partition."""
    connection = connect()
    fill_default(connection, 3000, "now() - interval '5 hours'")
    before = partitions(connection)
    (told,) = lines(connection, "select pgmb.make_partitions('pgmb.events', now() + interval '5 hours')")
    assert "stop_publishers => true" in told
    assert partitions(connection) == before


def test_the_default_partition_is_read_once_before_anything_is_attached(connect):
    connection = connect()
    publish(connection, 10, at="now() + interval '5 days'")
    told = []
    connection.add_notice_handler(lambda notice: told.append(notice.message_primary))
    connection.execute("set client_min_messages = debug1")
    added = [line for line in maintain(connection, "3 hours") if "added pgmb.events" in line]
    assert len(added) > 1
    assert told.count('verifying table "events_default"') == 1
    implied = [line for line in told if "partition constraint for" in line]
    assert len(implied) > len(added)
    assert all("is implied by existing constraints" in line for line in implied)
