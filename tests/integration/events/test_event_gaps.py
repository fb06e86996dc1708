"""Groups that read nothing for many partitions: their reads skip the partitions without dispatches to them."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.event_keeping import dispatch, maintain, narrow, partitions, publish, read, subscribe
from tests.tubes import one

GAPS = "select array_agg(array[left(low, 15), left(high, 15)] order by low) from pgmb.gap where group_id = %s"
READY = "select (pgmb.lag(%s, pgmb.position(%s), 1000) ->> 'ready')::bigint"


def to_next_partition(connection: psycopg.Connection[Any]) -> str:
    """Let the dispatcher go on in the next partition, as if time had passed. Return the first id of the partition."""
    return str(
        one(
            connection,
            "update pgmb.dispatcher as d set last_id = left(p.lower_bound, 14) || '1000000000' from ("
            "select p.lower_bound from pgmb.get_partitions_and_bounds('pgmb.dispatched'::regclass) as p, "
            "pgmb.dispatcher_now() as n where p.lower_bound > n.last_id order by 1 limit 1) as p "
            "returning left(p.lower_bound, 15)",
        )
    )


def to_later_partition(connection: psycopg.Connection[Any]) -> str:
    """Let two partitions pass with a run of maintenance in each. Return the first id of the last."""
    begins = ""
    for _ in range(2):
        begins = to_next_partition(connection)
        maintain(connection)
    return begins


def subscribe_before_many_partitions(connection: psycopg.Connection[Any]) -> None:
    """Subscribe group g, and make partitions of a second each for a minute: more than 50, which is many to a read."""
    subscribe(connection)
    narrow(connection, ahead="1 minute")
    for _ in range(2):
        maintain(connection)
    assert len(partitions(connection, "pgmb.dispatched")) > 50


def test_reads_skip_the_partitions_without_dispatches_to_a_group(connect):
    connection = connect()
    subscribe(connection, "idle", "rare")
    subscribe(connection, "new", "rare")
    subscribe(connection, "busy", "often")
    publish(connection, topic="rare")
    publish(connection, topic="often")
    dispatch(connection)
    assert len(read(connection, "idle")) == 1
    cursor = one(connection, "select pgmb.position('idle') ->> 'cursor'")
    for _ in range(2):
        edge = to_later_partition(connection)
        publish(connection, topic="often")
        dispatch(connection)
    # Before the first dispatch, and from the last dispatch up to the partition of the dispatcher.
    assert one(connection, GAPS, "idle") == [["", cursor[:15]], [cursor[:15], edge]]
    assert one(connection, "select pgmb.over_gap('idle', %s)", cursor) == edge + "0" * 9
    # A group that reads nothing still gets its first event, and a busy group has no gap of a whole partition.
    assert [one(connection, READY, group, group) for group in ("idle", "new", "busy")] == [0, 1, 3]
    publish(connection, 2, topic="rare")
    assert [one(connection, READY, group, group) for group in ("idle", "new")] == [2, 3]
    assert (len(read(connection, "idle")), len(read(connection, "new"))) == (2, 3)


def test_a_gap_of_whole_partitions_is_kept_for_a_group_before_it(connect):
    connection = connect()
    subscribe(connection)
    ids = publish(connection)
    dispatch(connection)
    first = one(connection, "select max(id) from pgmb.dispatched")[:15]
    to_later_partition(connection)
    ids += publish(connection)
    dispatch(connection)
    second = one(connection, "select max(id) from pgmb.dispatched")
    edge = to_later_partition(connection)
    gaps = one(connection, GAPS, "g")
    assert [low for low, _ in gaps] == ["", first, second[:15]]
    assert (gaps[0][1], gaps[1][1] < second[:15], gaps[2][1]) == (first, True, edge)
    assert one(connection, READY, "g", "g") == 2
    assert read(connection) == ids


def test_an_open_dispatch_is_behind_every_gap(connect):
    connection, dispatcher = connect(), connect(autocommit=False)
    subscribe(connection)
    to_next_partition(connection)
    ids = publish(connection)
    dispatcher.execute("select pgmb.dispatch()")
    maintain(connection)
    assert one(connection, READY, "g", "g") == 0
    dispatcher.commit()
    assert read(connection) == ids


def test_a_later_group_of_a_name_reads_its_own_events(connect):
    connection = connect()
    subscribe(connection)
    to_later_partition(connection)
    connection.execute("select pgmb.drop_consumer('g')")
    subscribe(connection)
    ids = publish(connection)
    dispatch(connection)
    to_later_partition(connection)
    assert one(connection, READY, "g", "g") == 1
    assert read(connection) == ids


def test_a_look_at_an_idle_group_locks_few_of_many_partitions(connect):
    connection = connect()
    subscribe_before_many_partitions(connection)
    for _ in range(8):
        to_next_partition(connection)
    connection.execute("select pgmb.note_gaps()")
    with connection.transaction():
        assert one(connection, READY, "g", "g") == 0
        locked = one(
            connection,
            "select count(*) from pg_locks as l join pg_inherits as i on i.inhrelid = l.relation "
            "where l.pid = pg_backend_pid() and i.inhparent = 'pgmb.dispatched'::regclass",
        )
    # The current partition, the partition before it, and the default partition.
    assert locked <= 3


def test_a_group_that_is_behind_many_partitions_reads_all_of_them(connect):
    """A read looks at the first part of its span, and then at the rest."""
    connection = connect()
    subscribe_before_many_partitions(connection)
    ids = []
    for _ in range(3):
        for _ in range(4):
            to_next_partition(connection)
        ids += publish(connection, 2)
        dispatch(connection)
    assert one(connection, READY, "g", "g") == 6
    assert 2 <= one(connection, "select pgmb.estimate_unread('g', '', 100)") <= 6
    counts = "select count, lowest from pgmb.next_events('g', '', %s)"
    assert [connection.execute(counts, [n]).fetchone() for n in (1, 5, 100)] == [
        (n, ids[0]) for n in (1, 5, 6)
    ]
    assert read(connection) == ids
