"""Setting and moving a group's cursor: its permitted positions, and the events that are read from there."""

from __future__ import annotations

import re
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import consumers, manual_operations
from airflow_pgchange.admin.new_consumers import with_new
from tests.event_keeping import kept, maintain
from tests.events import (
    FEED,
    TOPICAL,
    drain,
    error,
    poll_all,
    publish,
    publish_at,
    read,
    subscribe,
    take,
    work,
)
from tests.tubes import one


@pytest.mark.parametrize("name", ["cursor", "new_cursor"])
def test_a_reader_names_the_cursor_that_it_sets_as_the_manual_does_or_as_it_is_called(connect, name):
    connection, other = connect(), connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    [row] = read(connection, peek=False)
    connection.execute(
        f"select pgmb.set_group_cursor(gid := 'g', {name} := '{row['next_cursor']}', release_lock := true)"
    )
    assert one(other, "select pgmb.locked('g')") is False
    assert read(other, peek=False) == []


def test_a_read_whose_peek_is_null_is_no_peek(connect):
    connection, other = connect(), connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    assert len(read(connection, peek=False)) == 1
    assert read(other, peek=None) == []


@pytest.mark.parametrize("cursor", ["'{}'", "'{}'::text", "'{}'::varchar", "'{}'::pgmb.event_id"])
def test_a_cursor_of_any_type_of_text_is_set(connect, cursor):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    found = read(connection)[0]["next_cursor"]
    connection.execute(f"select pgmb.set_group_cursor('g', {cursor.format(found)})")
    connection.execute(
        f"select pgmb.set_group_cursor(g.id, {cursor.format(found)}) from pgmb.subscription_groups as g"
    )
    assert take(connection) == []


def test_a_group_can_be_rewound_to_a_time(connect):
    connection = connect()
    subscribe(connection)
    first = publish(connection, "a")
    assert drain(connection) == first
    moment = one(connection, "select clock_timestamp()")
    second = publish(connection, "b")
    assert drain(connection) == second
    connection.execute("select pgmb.set_group_cursor('g', pgmb.create_event_id(%s, 0))", [moment])
    assert take(connection) == second
    connection.execute("select pgmb.set_group_cursor('g', null)")
    assert take(connection) == first + second


MOVES = {
    "by a cursor": "select pgmb.set_group_cursor('g', pgmb.create_event_id({}, 0))",
    "to a point": "select pgmb.move_consumer('g', pgmb.point_of({}))",
}
each_move = pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)


@each_move
def test_a_group_is_not_moved_back_to_where_it_could_not_read_on(connect, move):
    connection = connect()
    subscribe(connection)
    moment = one(connection, "select clock_timestamp()")
    old = publish_at(connection, "now() - interval '3 hours'")
    assert drain(connection) == [old]
    later = publish(connection, "a")
    assert drain(connection) == later
    connection.execute("select pgmb.maintain_events_table()")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="they were deleted") as refused:
        connection.execute(move.format("%s"), [moment])
    assert take(connection) == []
    connection.execute(refused.value.diag.message_hint.rpartition(": ")[2])
    assert take(connection) == later


def test_a_group_whose_cursor_is_elsewhere_is_not_moved_back_to_where_it_could_not_read_on(
    db, other_db, connect_to
):
    results, source = connect_to(db), connect_to(other_db)
    subscribe(source)
    old = publish_at(source, "now() - interval '3 hours'")
    assert work(db, source=other_db) == [old]
    later = publish(source, "a")
    assert work(db, source=other_db) == later
    source.execute("select pgmb.maintain_events_table()")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="they were deleted") as refused:
        manual_operations.move_consumer(results, source, FEED, "beginning")
    assert work(db, source=other_db) == []
    told = re.search(r"airflow-pgchange move events:g --to '(.*)'$", refused.value.diag.message_hint)
    assert told is not None
    manual_operations.move_consumer(results, source, FEED, told[1])
    assert work(db, source=other_db) == later


def test_events_to_which_a_group_elsewhere_was_moved_back_are_kept_until_read(db, other_db, connect_to):
    results, source = connect_to(db), connect_to(other_db)
    subscribe(source)
    old = publish_at(source, "now() - interval '50 minutes'")
    assert work(db, source=other_db) == [old]
    later = publish(source, "a")
    assert work(db, source=other_db) == later
    manual_operations.move_consumer(results, source, FEED, "beginning")
    # By then the old event has passed its retention of an hour, and the later event has not, even if a new half hour
    # begins.
    maintain(source, "50 minutes")
    assert work(db, source=other_db, limit=1) == [old]
    assert work(db, source=other_db) == later
    maintain(source, "50 minutes")
    assert kept(source) == later


def test_a_group_that_is_moved_to_now_gets_nothing_again_after_the_clock_stepped_back(connect):
    connection = connect()
    subscribe(connection)
    ahead = "pgmb.create_event_id(now() + interval '1 hour', 0)"
    connection.execute(f"update pgmb.dispatcher set last_id = {ahead}")
    publish(connection, "a")
    drain(connection)
    connection.execute("select pgmb.move_consumer('g', pgmb.point_of())")
    new = publish(connection, "b")
    assert drain(connection) == new


def test_a_group_set_to_now_gets_what_is_dispatched_from_now_on(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "old")
    poll_all(connection)
    connection.execute("select pgmb.set_group_cursor('g', pgmb.create_event_id(clock_timestamp(), 0))")
    new = publish(connection, "new")
    assert drain(connection) == new


def test_the_point_of_now_waits_for_who_dispatches(connect):
    dispatching, connection = connect(autocommit=False), connect()
    dispatching.execute("select pgmb.dispatch()")
    connection.execute("set lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        connection.execute("select pgmb.point_of()")


def test_a_malformed_cursor_is_refused(connect):
    connection = connect()
    subscribe(connection)
    for cursor in ("pm12", "nonsense", "pm" + "g" * 22, ""):
        assert error(connection, "select pgmb.set_group_cursor('g', %s)", cursor).sqlstate == "22023", cursor
        point = Jsonb({"cursor": cursor, "source": one(connection, "select pgmb.here()")})
        for version in ("", ", 99"):
            move = f"select pgmb.move_consumer('g', %s{version})"
            assert error(connection, move, point).sqlstate == "22023", cursor
        assert error(connection, "select pgmb.read_next_events('g', %s)", cursor).sqlstate == "22023", cursor


def test_a_cursor_in_the_future_is_refused(connect):
    connection = connect()
    subscribe(connection)
    for move in MOVES.values():
        assert "future" in str(error(connection, move.format("now() + interval '1 hour'"))), move


@each_move
def test_events_after_the_clock_was_set_back_are_read_behind_an_earlier_cursor(connect, move):
    connection = connect()
    subscribe(connection)
    drain(connection)
    connection.execute(move.format("clock_timestamp()"))
    assert one(
        connection,
        "select left(g.last_read_event_id, 15) = left(d.last_id, 15) "
        "from pgmb.subscription_groups as g, pgmb.dispatcher_now() as d",
    )


def test_a_group_whose_cursor_is_elsewhere_is_not_moved_into_the_future(db, other_db, connect_to):
    results, source = connect_to(db), connect_to(other_db)
    subscribe(source)
    assert work(db, source=other_db) == []
    future = one(source, "select pgmb.create_event_id(now() + interval '1 hour', 0)")
    at = Jsonb(one(results, "select pgmb.position('g')"))
    point = Jsonb({"cursor": future, "source": one(source, "select pgmb.here()")})
    assert "future" in str(error(source, "select pgmb.note_move('g', %s, %s)", at, point))
    manual_operations.move_consumer(results, source, FEED, "now")
    ids = publish(source, "a")
    assert work(db, source=other_db) == ids


def test_the_cursor_of_another_group_is_refused(connect):
    connection = connect()
    subscribe(connection, "g", TOPICAL, {"topic": "a"})
    subscribe(connection, "h", TOPICAL, {"topic": "b"})
    publish(connection, "a", "b", "b")
    poll_all(connection)
    theirs = read(connection, "h")[0]["next_cursor"]
    assert "not one of group" in str(error(connection, "select pgmb.set_group_cursor('g', %s)", theirs))


def test_a_group_that_another_reads_is_not_moved(connect):
    connection, other = connect(), connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    cursor = read(connection, peek=False)[0]["next_cursor"]
    assert error(other, "select pgmb.set_group_cursor('g', %s)", cursor).sqlstate == "55P03"


def test_a_group_whose_cursor_has_moved_is_not_new_to_status(connect):
    """Handlers move the cursor, and claim no batch."""
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    named = {("event", "events:g"): SimpleNamespace(feed=FEED, start="beginning")}

    def new():
        rows = consumers.status(connection, connection, print)
        return [row["new"] for row in with_new(connection, connection, rows, named)]

    assert new() == ["new consumer, starts at the beginning: 1 change"]
    take(connection)
    assert new() == [None]
