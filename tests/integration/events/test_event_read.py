"""Reading by a cursor: in order, without loss, and under a lock that is released."""

from __future__ import annotations

import random

import psycopg
import pytest

from tests.event_keeping import maintain
from tests.events import (
    drain,
    error,
    poll_all,
    publish,
    publish_at,
    read,
    subscribe,
    take,
)
from tests.tubes import one
from tests.waiting import locks, until


def test_chunks_follow_one_another_in_order_without_loss(connect):
    connection = connect()
    subscribe(connection)
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, 3000)"
    )
    ids = [row[0] for row in connection.execute("select id from pgmb.events order by id").fetchall()]
    poll_all(connection)
    found = []
    while taken := take(connection, chunk=171):
        found += taken
    assert found == ids


def test_nothing_of_a_slice_is_moved_out_of_its_row(connect):
    connection = connect()
    subscribe(connection)
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, 600)"
    )
    poll_all(connection)
    assert one(connection, "select max(cardinality(event_ids)) from pgmb.dispatched") == 280
    moved = """
        select sum(pg_relation_size(c.reltoastrelid)) from pg_partition_tree('pgmb.dispatched') as p
        join pg_class as c on c.oid = p.relid where p.isleaf
        """
    assert one(connection, moved) == 0


def test_one_old_event_does_not_make_the_others_be_looked_for_in_every_partition(connect):
    connection = connect()
    connection.execute("update pgmb.config set value = '40 hours' where id = 'future_intervals_to_create'")
    connection.execute("select pgmb.make_partitions('pgmb.events', now() - interval '40 hours')")
    subscribe(connection)

    def pages(first: str) -> int:
        publish_at(connection, first)
        connection.execute(
            "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, 5000)"
        )
        poll_all(connection)
        query = "explain (analyze, buffers, format json) select * from pgmb.read_next_events('g', null, 5001)"
        plan = [one(connection, query)[0]["Plan"] for _ in range(2)][1]
        taken = take(connection, chunk=6000)
        assert len(taken) == 5001
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    few = pages("now()")
    assert pages("now() - interval '39 hours'") <= 10 * few


def test_next_cursor_is_the_same_in_every_row_and_leads_on(connect):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, *"abcde")
    poll_all(connection)
    first = read(connection, chunk=2)
    assert len({row["next_cursor"] for row in first}) == 1
    assert [row["id"] for row in read(connection, chunk=9, cursor=first[0]["next_cursor"])] == ids[2:]


def test_reading_does_not_move_the_cursor(connect):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, "a")
    poll_all(connection)
    assert [[row["id"] for row in read(connection)] for _ in range(2)] == [ids, ids]


def test_a_reader_keeps_others_out_until_it_has_released_as_often_as_it_read(connect):
    connection, other = connect(), connect()
    subscribe(connection)
    publish(connection, "a", "b")
    poll_all(connection)
    first = read(connection, chunk=1, peek=False)[0]["next_cursor"]
    second = read(connection, chunk=1, cursor=first, peek=False)[0]["next_cursor"]
    connection.execute("select pgmb.set_group_cursor('g', %s, true)", [first])
    assert read(other, peek=False) == []
    connection.execute("select pgmb.set_group_cursor('g', %s, true)", [second])
    publish(connection, "c")
    poll_all(connection)
    assert [row["topic"] for row in read(other, peek=False)] == ["c"]


def test_a_read_that_finds_nothing_wants_a_release_too(connect):
    connection, other = connect(), connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    [row] = read(connection, peek=False)
    assert read(connection, cursor=row["next_cursor"], peek=False) == []
    assert one(connection, "select pgmb.release_group_lock('g')") is True
    assert read(other, peek=False) == []
    connection.execute("select pgmb.set_group_cursor('g', %s, true)", [row["next_cursor"]])
    assert one(other, "select pgmb.locked('g')") is False


class ReadAhead:
    """A client that reads ahead: it reads the next chunks before it has handled the earlier ones.

    Each read takes the lock. When the client has handled a chunk, in order, it stores the cursor and releases the lock
    once.
    """

    def __init__(self, connection, handled):
        self.connection = connection
        self.handled = handled
        self.batches = []

    def read_on(self):
        cursor = self.batches[-1][-1]["next_cursor"] if self.batches else None
        if found := read(self.connection, chunk=1, cursor=cursor, peek=False):
            self.batches.append(found)
        else:
            self.connection.execute("select pgmb.release_group_lock('g')")

    def handle(self):
        if self.batches:
            batch = self.batches.pop(0)
            self.handled += [row["id"] for row in batch]
            self.connection.execute("select pgmb.set_group_cursor('g', %s, true)", [batch[-1]["next_cursor"]])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_clients_of_one_group_that_read_ahead_handle_each_event_once(connect, seed):
    chosen = random.Random(seed)
    connection = connect()
    subscribe(connection)
    ids = publish(connection, *["t"] * 20)
    poll_all(connection)
    handled = []
    clients = [ReadAhead(connect(), handled) for _ in range(3)]
    for _ in range(1000):
        chosen.choice([ReadAhead.read_on, ReadAhead.handle])(chosen.choice(clients))
        if len(handled) >= len(ids) and not any(client.batches for client in clients):
            break
    assert handled == ids


def test_a_peek_takes_no_lock_and_sees_what_another_reads(connect):
    connection, other = connect(), connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    read(connection, peek=True)
    assert one(connection, "select pgmb.locked('g')") is False
    read(connection, peek=False)
    assert len(read(other, peek=True)) == 1


def test_an_unknown_group_is_named_and_takes_no_lock(connect):
    connection = connect()
    refused = error(connection, "select pgmb.read_next_events('nosuch')")
    assert (refused.sqlstate, "nosuch" in str(refused)) == ("PC002", True)
    assert "advisory" not in {lock.kind for lock in locks(connection, connection)}


def test_a_lock_that_is_not_held_is_not_released(connect):
    connection = connect()
    subscribe(connection)
    assert one(connection, "select pgmb.release_group_lock('g')") is False


def test_the_end_of_a_session_releases_its_group(connect, db):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    poll_all(connection)
    with psycopg.connect(db, autocommit=True) as reader:
        read(reader, peek=False)
    until(connection, "select not pgmb.locked('g')")
    assert len(read(connection, peek=False)) == 1


def test_events_are_read_by_their_ids_in_the_order_asked_for(connect):
    connection = connect()
    ids = publish(connection, "a", "b", "c")
    rows = connection.execute(
        "select id, topic from pgmb.read_events(%s::varchar[])", [[ids[2], "pm" + "0" * 22, ids[0]]]
    ).fetchall()
    assert rows == [(ids[2], "c"), (ids[0], "a")]


def test_events_that_are_due_later_do_not_hold_up_others(connect):
    connection = connect()
    subscribe(connection)
    publish_at(connection, "now() + interval '1 hour'")
    ids = publish(connection, "a")
    assert drain(connection) == ids


def test_events_that_are_gone_are_not_passed_over_in_silence(connect):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, "a", "b")
    poll_all(connection)
    connection.execute("delete from pgmb.events where id = %s", [ids[0]])
    assert error(connection, "select pgmb.read_next_events('g', chunk_size => 10)").sqlstate == "55000"
    # After a failed call other sessions can read the group.
    assert connect().execute("select pg_try_advisory_lock(pgmb.lock_key('g'))").fetchone() == (True,)


@pytest.mark.parametrize("hashing", ["on", "off"])
@pytest.mark.parametrize("direct", [True, False])
def test_events_that_a_poll_dispatches_to_several_groups_are_read_in_order(connect, direct, hashing):
    connection = connect()
    connection.execute(f"set enable_hashagg = {hashing}")
    of = "false" if direct else "e.payload ->> 'of' = s.params ->> 'of'"
    subscriptions = {group: subscribe(connection, group, of, {"of": group}) for group in "abc"}
    published = connection.execute(
        "insert into pgmb.events (topic, payload, subscription_id) "
        "select 't', jsonb_build_object('of', (%(groups)s::text[])[1 + g %% 3]), (%(to)s::text[])[1 + g %% 3] "
        "from generate_series(1, 90) as g returning id, payload ->> 'of'",
        {"groups": list(subscriptions), "to": list(subscriptions.values()) if direct else [None] * 3},
    ).fetchall()
    poll_all(connection)
    for group in subscriptions:
        expected = [event for event, addressed in published if addressed == group]
        assert [event["id"] for event in read(connection, group)] == expected


@pytest.mark.parametrize("shared", [False, True])
def test_a_reader_is_told_how_to_come_past_an_event_that_was_deleted(connect, shared):
    connection = connect()
    subscribe(connection)
    if shared:
        subscribe(connection, "e.topic <> 'other'")
    ids = publish(connection, *"abcdefghij")
    poll_all(connection)
    first = read(connection, chunk=2)[-1]["next_cursor"]
    connection.execute("select pgmb.set_group_cursor('g', %s)", [first])
    connection.execute("delete from pgmb.events where id = %s", [ids[5]])
    refused = error(connection, "select pgmb.read_next_events('g', peek => true)")
    assert f"only 7 could be read: {ids[5]} was deleted" in str(refused)
    assert "the 3 events before it (chunk_size => 3)" in refused.diag.message_hint
    before = read(connection, chunk=3)
    connection.execute(refused.diag.message_hint.rpartition(": ")[2])
    assert [row["id"] for row in before] + take(connection) == ids[2:5] + ids[6:]


def test_a_published_log_is_dispatched_read_and_maintained(connect):
    connection = connect()
    connection.execute("create publication everything for all tables")
    subscribe(connection)
    ids = publish(connection, "a", "b")
    assert poll_all(connection) == 2
    assert take(connection) == ids
    late = publish_at(connection, "clock_timestamp() + interval '1 s'")
    publish_at(connection, "now() + interval '30 days'")
    maintain(connection)
    connection.execute(
        "select pg_sleep_until(pgmb.extract_date_from_event_id(%s) + interval '10 ms')", [late]
    )
    assert drain(connection) == [late]
    connection.execute("delete from pgmb.subscription_groups")
    subscribe(connection)
    assert drain(connection) == []
    maintain(connection)
