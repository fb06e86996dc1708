"""Partitions of the event log: created ahead, with the length that is configured now, and without delays for others."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from tests.event_keeping import (
    configure,
    contiguous,
    dispatch,
    drop_all,
    kept,
    lines,
    maintain,
    partitions,
    publish,
    read,
    subscribe,
)
from tests.tubes import one

DEFAULT = "select count(*) from pgmb.events_default"
LATER = "select count(*) from pgmb.later"


def widths(connection, table="pgmb.events"):
    return {upper - lower for _, lower, upper in partitions(connection, table)}


@pytest.mark.parametrize("table", ["pgmb.events", "pgmb.dispatched"])
def test_an_installed_log_has_partitions_for_the_time_to_come(connect, table):
    connection = connect()
    now = one(connection, "select now()")
    found = partitions(connection, table)
    assert found[0][1] <= now
    assert found[-1][2] >= now + timedelta(hours=2.5)
    assert contiguous(connection, table)


def test_an_event_goes_into_the_partition_of_its_time(connect):
    connection = connect()
    configure(connection, partition_interval="1 hour")
    maintain(connection)
    publish(connection)
    publish(connection, at="now() + interval '2 hours'")
    found = connection.execute("select tableoid::regclass::text from pgmb.events order by id").fetchall()
    current = one(connection, "select pgmb.get_current_partition('pgmb.events'::regclass)::text")
    later = one(
        connection,
        "select pgmb.get_current_partition('pgmb.events'::regclass, now() + interval '2 hours')::text",
    )
    assert found == [(current,), (later,)]
    assert current != later


def test_a_second_maintenance_does_nothing(connect):
    connection = connect()
    # Use one moment for all queries, even if a new half hour begins meanwhile.
    now = one(connection, "select now()")
    again = f"select pgmb.maintain_log('{now}')"
    lines(connection, again)
    before = partitions(connection)
    assert lines(connection, again) == []
    assert partitions(connection) == before


def test_partitions_follow_time(connect):
    connection = connect()
    for hours in range(1, 6):
        maintain(connection, f"{hours} hours")
    assert contiguous(connection)
    assert widths(connection) == {timedelta(minutes=30)}


def test_a_log_that_nobody_maintained_gets_one_partition_for_all_of_that_time(connect):
    connection = connect()
    before = len(partitions(connection))
    maintain(connection, "30 days")
    assert contiguous(connection)
    assert len(partitions(connection)) < before + 9
    assert max(widths(connection)) > timedelta(days=29)


def test_another_interval_holds_from_the_next_maintenance_on(connect):
    tables = ("pgmb.events", "pgmb.dispatched")
    connection = connect()
    configure(
        connection,
        partition_interval="1 day",
        partition_retention_period="7 days",
        future_intervals_to_create="14 days",
    )
    now = one(connection, "select now()")
    maintain(connection)
    for table in tables:
        assert contiguous(connection, table)
        assert max(widths(connection, table)) == timedelta(days=1), table
        assert partitions(connection, table)[-1][2] >= now + timedelta(days=14), table
    configure(connection, partition_interval="1 minute", future_intervals_to_create="10 minutes")
    maintain(connection)
    now = one(connection, "select now()")
    for table in tables:
        assert contiguous(connection, table)
        ahead = [(lower, upper) for _, lower, upper in partitions(connection, table) if lower > now]
        assert {upper - lower for lower, upper in ahead} <= {timedelta(minutes=1), timedelta(minutes=30)} | {
            upper - lower for lower, upper in ahead[-1:]
        }, table
    assert not [line for line in maintain(connection) if "dropped" in line]


def test_a_partition_that_gives_way_to_shorter_ones_is_named(connect):
    connection = connect()
    now = one(connection, "select now()")
    ahead = [name.removeprefix("pgmb.") for name, lower, _ in partitions(connection) if lower > now]
    configure(connection, partition_interval="10 minutes")
    said = lines(connection, f"select pgmb.make_partitions('pgmb.events', '{now}')")
    assert [line for line in said if "dropped" in line] == [
        f"dropped the empty partition {name}" for name in ahead
    ]


def test_events_that_wait_in_a_partition_made_ahead_stay_when_the_interval_changes(connect):
    connection = connect()
    configure(connection, partition_interval="1 day", partition_retention_period="2 days")
    configure(connection, future_intervals_to_create="4 days")
    maintain(connection)
    waiting = publish(connection, at="now() + interval '2 days'")
    configure(connection, partition_interval="1 hour")
    while any(line.startswith("left") for line in maintain(connection)):
        pass
    assert contiguous(connection)
    assert kept(connection) == waiting
    assert one(connection, DEFAULT) == 0


def test_an_event_beyond_the_last_partition_or_before_the_first_is_taken(connect):
    connection = connect()
    early = publish(connection, at="now() - interval '3 days'")
    late = publish(connection, at="now() + interval '3 days'")
    assert kept(connection) == [*early, *late]
    assert one(connection, DEFAULT) == 2


@pytest.mark.parametrize("table", ["events", "dispatched"])
def test_rows_that_may_be_being_read_are_not_moved(connect, table):
    connection = connect()
    drop_all(connection, f"pgmb.{table}")
    configure(connection, future_intervals_to_create="30 minutes")
    subscribe(connection)
    # Use one moment for all queries, even if a new hour begins meanwhile.
    now = one(connection, "select now()")
    make = f"select pgmb.make_partitions('pgmb.{table}', '{now}')"
    expected = publish(connection, 10)
    dispatch(connection)
    places = f"select ctid, tableoid from pgmb.{table} order by id"
    before = connection.execute(places).fetchall()
    (first, *_) = lines(connection, make)
    assert "added" in first
    assert connection.execute(places).fetchall() == before
    _, begins, ends = partitions(connection, f"pgmb.{table}")[0]
    assert (begins - datetime(1970, 1, 1, tzinfo=UTC)) % timedelta(minutes=30) == timedelta(0)
    assert (now < begins <= now + timedelta(minutes=31), ends - begins) == (True, timedelta(minutes=30))
    assert read(connection) == expected
    assert lines(connection, make) == []


def test_where_another_interval_left_a_partition_in_the_way_the_next_begins_behind_it(connect):
    connection = connect()
    drop_all(connection)
    publish(connection)
    span = connection.execute("select now() + interval '3 seconds', now() + interval '2 hours'").fetchone()
    connection.execute("select pgmb.prepare_partition('pgmb.events', tstzrange(%s, %s))", span)
    connection.execute("select pgmb.attach_partitions('pgmb.events', array[tstzrange(%s, %s)])", span)
    waiting = publish(connection, at="now() + interval '1 hour'")
    configure(connection, partition_interval="1 minute", future_intervals_to_create="4 hours")
    while any("left" in line for line in lines(connection, "select pgmb.make_partitions('pgmb.events')")):
        pass
    assert contiguous(connection)
    assert len(partitions(connection)) > 100
    assert kept(connection)[1:] == waiting


def test_a_maintenance_has_emptied_what_is_old_before_it_locks_a_whole_table(connect):
    connection = connect()
    subscribe(connection)
    publish(connection)
    dispatch(connection)
    read(connection)
    told = maintain(connection, "5 hours")
    emptied = [n for n, line in enumerate(told) if "emptied events" in line]
    added = [n for n, line in enumerate(told) if "added" in line]
    assert emptied
    assert added
    assert max(emptied) < min(added)


def test_partitions_have_what_the_table_has(connect):
    connection = connect()
    part = one(connection, "select pgmb.get_current_partition('pgmb.events'::regclass)::text")
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(f"insert into {part} (id, topic, payload) values ('pm', 't', '{{}}')")
    indexes = "select count(*) from pg_index where indrelid = %s::regclass"
    assert one(connection, indexes, part) == one(connection, indexes, "pgmb.events")
    storage = "select attstorage from pg_attribute where attname = 'event_ids' and attrelid = %s::regclass"
    part = one(connection, "select pgmb.get_current_partition('pgmb.dispatched'::regclass)::text")
    assert one(connection, storage, part) == one(connection, storage, "pgmb.dispatched")


def test_a_publisher_does_not_wait_for_maintenance_that_has_nothing_to_attach_or_drop(connect):
    connection, maintaining = connect(), connect(autocommit=False)
    publish(connection)
    maintain(connection)
    assert any("not all in it is dispatched" in line for line in trimmed(maintaining, "5 hours"))
    connection.execute("set lock_timeout = '1s'")
    publish(connection, 3)
    maintaining.commit()
    assert len(kept(connection)) == 4


def trimmed(connection, later):
    return lines(connection, f"select pgmb.trim_partitions('pgmb.events', now() + interval '{later}')")


def test_the_manual_s_spelling_of_maintenance_works_and_call_without_a_time_says_what_does(connect):
    connection = connect()
    connection.execute("SELECT pgmb.maintain_events_table()")
    connection.execute("select pgmb.maintain_append_only_table('pgmb.events', now())")
    with pytest.raises(psycopg.errors.WrongObjectType) as refused:
        connection.execute("call pgmb.maintain_events_table()")
    assert "use SELECT" in refused.value.diag.message_hint


@pytest.mark.parametrize("function", ["maintain_append_only_table", "crowded_default", "make_partitions"])
@pytest.mark.parametrize("table", ["pgmb.config", None])
def test_a_table_that_is_not_kept_by_time_is_refused(unchanged, function, table):
    """These run with the rights of the log's owner, and so would any function that another role's table calls."""
    with pytest.raises(psycopg.Error, match="it is not partitioned by time"):
        unchanged.execute(f"select pgmb.{function}(%s)", [table])


@pytest.mark.parametrize(
    "time", [None, "infinity", "-infinity", "1960-01-01", "2400-01-01", "2112-09-17 22:00"]
)
def test_a_time_around_which_there_can_be_no_partition_is_refused(unchanged, time):
    said = f"as of {time[:4] if time else 'null'}"
    of_a_table = [
        "maintain_append_only_table",
        "make_partitions",
        "trim_partitions",
        "drop_emptied",
        "crowded_default",
    ]
    for call in ("maintain_log(", "place_scheduled(", *[f"{f}('pgmb.events', " for f in of_a_table]):
        with pytest.raises(psycopg.Error, match=said) as refused, unchanged.transaction():
            unchanged.execute("set local statement_timeout = '5s'")
            unchanged.execute(f"select pgmb.{call}%s)", [time])
        assert refused.value.sqlstate == "PC008"
        assert "1970 to 2112-09-17" in refused.value.diag.message_hint


def test_maintenance_that_could_not_look_twice_is_refused(connect):
    connection = connect(autocommit=False)
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.Error, match="read committed") as refused:
        maintain(connection)
    assert refused.value.sqlstate == "PC007"


def test_a_maintainer_needs_no_other_right(connect, role):
    keeper = role("keeper")
    connect().execute(f"select pgmb.grant_maintainer('{keeper.name}')")
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        told = []
        as_keeper.add_notice_handler(lambda notice: told.append(notice.message_primary))
        as_keeper.execute("call pgmb.maintain_events_table(now() + interval '5 hours')")
        assert any("added" in line for line in told)
        as_keeper.execute("select pgmb.maintain_events_table()")
        assert as_keeper.execute("select * from pgmb.holders()").fetchall() == []


def test_bounds_are_whole_multiples_of_the_interval(connect):
    connection = connect()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    ends = [upper for _, _, upper in partitions(connection)]
    assert ends
    assert {(upper - epoch) % timedelta(minutes=30) for upper in ends} == {timedelta(0)}


@pytest.mark.parametrize("width", ["1 day", "7 days"])
def test_a_partition_ends_at_the_same_time_wherever_clocks_change(connect, width):
    """In that time zone a day of 23 hours would end before it began. Partitions of no length would be created without
    end."""
    connection = connect()
    query = "select pgmb.end_of_partition('2026-03-29 00:00Z', %s) > '2026-03-29 23:00Z'"
    assert one(connection, query, width)
    connection.execute("set timezone = 'Europe/Berlin'")
    assert one(connection, query, width)
    assert one(connection, "select pgmb.end_of_partition('2026-03-29 23:00Z', '1 day')") == datetime(
        2026, 3, 30, tzinfo=UTC
    )
