"""Workers and shards: the worker that gets a pod, also while the number of workers or the shard of a table changes."""

from __future__ import annotations

import psycopg
import pytest

from tests.tubes import (
    ack,
    attach,
    changes,
    claim,
    controls,
    detach,
    drain,
    lag,
    make,
    one,
    pods,
    take,
    touch,
)


def test_a_shard_belongs_to_one_worker_and_negative_ones_too(connect):
    connection = connect()
    make(connection, workers=3)
    for shard in range(-4, 5):
        touch(connection, shard, shard=shard)
    assert [sorted(take(connection, worker, 3)) for worker in range(3)] == [
        [-3, 0, 3],
        [-2, 1, 4],
        [-4, -1, 2],
    ]


def test_while_the_number_of_workers_changes_nothing_is_missed_and_nothing_done_twice(q, connect):
    for n in range(40):
        touch(q, n, shard=n)
    got = take(q, limit=7)
    slow = connect(autocommit=False)
    touch(slow, 100, shard=1)
    got += take(q, limit=7)
    slow.commit()
    make(q, workers=4)
    got += take(q, 1, 4, limit=3)
    make(q, workers=3)
    for worker in range(3):
        got += drain(q, worker, 3, limit=5)
    assert sorted(got) == [*range(40), 100]


def test_a_worker_of_another_number_of_workers_is_refused(q):
    touch(q, 1)
    make(q, workers=4)
    with pytest.raises(psycopg.Error, match="shared by 4 workers now") as told:
        claim(q, 0, 1)
    assert told.value.sqlstate == "PC006"


def test_the_number_of_workers_does_not_change_while_one_is_at_work(q, connect):
    worker = connect(autocommit=False)
    assert one(worker, "select tube.take_lock('q', 0)") is True
    q.execute("set lock_timeout = '100ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="are at work"):
        make(q, workers=2)
    assert one(q, "select partitions from tube.tube") == 1
    worker.rollback()
    make(q, workers=2)


def test_a_worker_runs_only_once_at_a_time(q, connect):
    first, second = connect(autocommit=False), connect(autocommit=False)
    assert one(first, "select tube.take_lock('q', 0)") is True
    assert one(q, "select tube.locked('q', 0)") is True
    assert one(second, "select tube.take_lock('q', 0)") is False
    first.rollback()
    assert one(second, "select tube.take_lock('q', 0)") is True


def test_a_table_that_changes_its_shard_waits_until_the_old_shards_pods_are_done(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection, workers=2)
    attach(connection, shard=0)
    connection.execute("insert into item values (1), (2)")
    batch = claim(connection, 0, 2)
    attach(connection, shard=1)
    touch(connection, 77, shard=3)
    connection.execute("update item set n = 1 where id = 1")
    assert take(connection, 1, 2) == [77]
    shown = lag(connection, 1, 2)
    assert (shown["ready"], shown["waiting"]) == (0, 2)
    ack(connection, batch, 0)
    # The old shard's worker has not replayed these pods. They are repeated under the new shard, whose worker now reads
    # the table.
    assert lag(connection, 1, 2)["ready"] == 2
    assert take(connection, 1, 2) == [1, 2]
    assert take(connection, 1, 2) == []
    assert one(connection, "select count(*) from tube.moved") == 0


def test_a_table_that_was_detached_and_attached_under_another_shard_waits_too(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection, workers=2)
    attach(connection, shard=0)
    connection.execute("insert into item values (1)")
    detach(connection)
    attach(connection, shard=1)
    connection.execute("update item set n = 1")
    assert take(connection, 1, 2) == []
    assert take(connection, 0, 2) == [1]
    assert take(connection, 1, 2) == [1]


def test_a_table_that_moves_twice_waits_for_its_first_shard(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection, workers=3)
    attach(connection, shard=0)
    connection.execute("insert into item values (1)")
    attach(connection, shard=1)
    attach(connection, shard=2)
    connection.execute("update item set n = 1")
    assert take(connection, 1, 3) + take(connection, 2, 3) == []
    attach(connection, shard=0)
    connection.execute("update item set n = 2")
    for worker in (0, 1, 2, 0):
        assert take(connection, worker, 3) == [1]
    assert pods(connection) == []


def test_a_table_that_changes_its_shard_does_not_wait_for_the_old_shard_of_another_table(connect):
    connection = connect()
    make(connection, workers=4)
    for name, old, new in [("a", 0, 1), ("b", 2, 3)]:
        connection.execute(f"create table {name} (id bigint primary key)")
        attach(connection, name, shard=old)
        connection.execute(f"insert into {name} values ({old})")
        attach(connection, name, shard=new)
    assert take(connection, 2, 4) == [2]
    # Worker 0 has not read the old pods of a.
    assert take(connection, 1, 4) == []
    assert take(connection, 3, 4) == [2]


def test_tables_that_swap_their_shards_do_not_wait_for_each_other_for_ever(connect):
    connection = connect()
    make(connection, workers=2)
    for name, shard in [("a", 0), ("b", 1)]:
        connection.execute(f"create table {name} (id bigint primary key)")
        attach(connection, name, shard=shard)
        connection.execute(f"insert into {name} values (1), (2)")
    attach(connection, "a", shard=1)
    connection.execute("update a set id = id + 10")
    attach(connection, "b", shard=0)
    connection.execute("update b set id = id + 20")
    attach(connection, "a", shard=0)
    connection.execute("update a set id = id + 100")
    got = []
    for _ in range(20):
        got += take(connection, 0, 2, limit=2) + take(connection, 1, 2, limit=2)
    assert set(got) == {1, 2, 11, 12, 21, 22, 111, 112}
    assert pods(connection) == []


@pytest.mark.parametrize(
    ("workers", "shards"), [(1, (0, 1)), (2, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 2))], ids=str
)
def test_waiting_pods_do_not_grow_with_the_moves_of_a_table(connect, workers, shards):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection, workers=workers)
    attach(connection, shard=0)
    connection.execute("insert into item select generate_series(1, 100); truncate item")
    connection.execute("insert into item select generate_series(1, 100); update item set n = 1")
    touch(connection, 1, 2, payload={"why": "asked"})
    for turn in range(1, 21):
        attach(connection, shard=shards[turn % len(shards)])
        connection.execute("update item set n = %s where id = 7", [turn])
        found = pods(connection)
        for shard in range(3):
            waiting = [each for _, of, ids in found if of == shard for each in ids]
            # Inserts, updates and a touch by SQL are there as they were written, and again as they came from another
            # shard.
            assert len(waiting) <= (302 + 202 if shard == 0 else 202) + turn
        assert len(controls(connection)) <= len(shards) + 1
    got = []
    for _ in range(10):
        got += [each for worker in range(workers) for each in drain(connection, worker, workers)]
    assert set(got) == set(range(1, 101))
    assert pods(connection) == []


def test_a_table_that_comes_back_leaves_a_batch_that_was_claimed_as_it_is(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection)
    attach(connection, shard=0)
    connection.execute("insert into item values (1), (2)")
    attach(connection, shard=1)
    batch = claim(connection)
    attach(connection, shard=0)
    attach(connection, shard=1)
    again = claim(connection)
    assert (again["id"], again["attempt"]) == (batch["id"], 2)
    assert sorted(changes(connection, again)) == [1, 1, 2, 2]
    ack(connection, again)
    # Between the claim and the ack the table had another worker. So the results of the batch may differ from the
    # present rows.
    assert set(drain(connection)) == {1, 2}


def test_a_table_that_comes_back_brings_what_was_touched_meanwhile_and_what_waits_for_it_last(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection, workers=2)
    attach(connection, shard=0)
    connection.execute("insert into item values (1), (2)")
    attach(connection, shard=1)
    connection.execute("update item set n = 1 where id = 2")
    attach(connection, shard=0)
    connection.execute("insert into item values (3); truncate item")
    attach(connection, shard=1)
    assert take(connection, 1, 2) == []
    assert take(connection, 0, 2, limit=2) == [1, 2]
    assert take(connection, 1, 2) == []
    assert drain(connection, 0, 2) == [1, 2, 3]
    assert sorted(drain(connection, 1, 2)) == [1, 2, 3]
    assert [shard for _, shard, _ in controls(connection)] == [0, 1]


def test_a_role_that_may_not_delete_pods_can_move_a_table(connect, role, connect_to):
    connection = connect()
    make(connection)
    who = role("owner")
    connection.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    connection.execute(f"grant insert, select on q to {who.name}; create schema own authorization {who.name}")
    owner = connect_to(who.conninfo)
    owner.execute("create table own.item (id bigint primary key)")
    attach(owner, "own.item")
    owner.execute("insert into own.item values (1)")
    for turn in range(1, 8):
        attach(owner, "own.item", shard=turn % 2)
    assert [ids for _, _, ids in pods(connection)] == [[1]] * 8


def test_pods_deleted_by_hand_do_not_prevent_the_move_of_a_table(connect):
    connection, by_hand = connect(), connect(autocommit=False)
    connection.execute("create table item (id bigint primary key)")
    make(connection)
    attach(connection, shard=0)
    connection.execute("insert into item values (1)")
    attach(connection, shard=1)
    attach(connection, shard=0)
    by_hand.execute("delete from q where shard = 1")
    connection.execute("set statement_timeout = '10s'")
    attach(connection, shard=1)
    by_hand.commit()
    assert 1 in [shard for _, shard, _ in pods(connection)]
    assert set(drain(connection)) == {1}
