"""Workers: nothing is missed or done out of order, and no id is in two batches at once."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_pgchange.feeds import TubeFeed
from tests.acks import only_the_claimed_version_is_acked
from tests.tubes import ack, attach, changes, claim, drain, make, one, pods, take, touch
from tests.waiting import pause_after, until, waits


def test_a_batch_has_the_ids_in_the_order_of_touching_each_once(q):
    touch(q, 5, 3)
    touch(q, 3, 9)
    assert take(q) == [3, 5, 9]
    assert pods(q) == []


def test_nothing_ready_is_no_batch_and_takes_no_transaction_id(q):
    claim(q)
    before = one(q, "select pg_current_xact_id()::text::bigint")
    assert claim(q) is None
    assert one(q, "select pg_current_xact_id()::text::bigint") == before + 1


def test_incremental_pods_come_before_those_of_a_backfill_and_each_kind_in_order(q):
    touch(q, 1, op="B")
    touch(q, 2, op="B")
    touch(q, 3)
    assert take(q, limit=2) == [3, 1]
    touch(q, 4)
    assert take(q) == [4, 2]


def test_a_batch_has_at_most_so_many_ids_or_one_pod(q):
    touch(q, 1, 2, 3)
    touch(q, 4)
    touch(q, 5, 6)
    assert [take(q, limit=2) for _ in range(3)] == [[1, 2, 3], [4], [5, 6]]
    touch(q, 1, 2, 3)
    touch(q, 4)
    touch(q, 5)
    assert take(q, limit=4) == [1, 2, 3, 4]


def test_an_id_of_two_shards_comes_for_each(q):
    touch(q, 1, shard=0)
    touch(q, 1, shard=1)
    assert take(q) == [1, 1]


def test_the_latest_payload_goes_with_the_id(q):
    touch(q, 1, payload={"n": 1})
    touch(q, 1, payload={"n": 2})
    touch(q, 1)
    batch = claim(q)
    query = (
        "select payload, seq, backfill from tube.changes('q', 0, %s, '{-2147483648, -1}', '{2147483647, 64}')"
    )
    assert q.execute(query, [json.dumps(batch["bounds"])]).fetchall() == [({"n": 2}, 3, False)]


def test_an_unacked_batch_is_the_same_again_whatever_came_meanwhile(q):
    touch(q, 1)
    touch(q, 2, op="B")
    first = claim(q)
    touch(q, 3)
    second = claim(q, limit=1)
    assert (second["id"], second["attempt"]) == (first["id"], 2)
    assert changes(q, second) == [1, 2]
    ack(q, second)
    assert take(q) == [3]


def test_a_large_batch_is_read_in_parts_that_together_are_it(q):
    touch(q, *range(50_000))
    touch(q, *range(25_000, 75_000))
    touch(q, *range(10), shard=1)
    batch = claim(q, limit=200_000)
    assert [part["upto"][0] for part in batch["slices"]] == [0, 0, 0, 0, 1]
    assert batch["count"] == 75_010
    assert sorted(changes(q, batch)) == sorted([*range(75_000), *range(10)])
    ack(q, batch)
    assert pods(q) == []


def test_a_lower_seq_that_commits_later_is_not_missed(q, connect):
    slow = connect(autocommit=False)
    touch(slow, 1)
    touch(q, 2)
    assert take(q) == [2]
    slow.commit()
    assert take(q) == [1]


def test_a_lower_seq_of_a_transaction_above_the_snapshot_is_not_missed(q, connect):
    """The id of an open transaction can be at or above the snapshot's xmax, and then the snapshot does not list it."""
    early, late = connect(autocommit=False), connect(autocommit=False)
    early.execute("select pg_current_xact_id()")
    touch(late, 1)
    touch(early, 2)
    early.commit()
    assert one(q, "select pg_snapshot_xip(pg_current_snapshot())") is None
    assert take(q) == [2]
    late.commit()
    assert take(q) == [1]


def test_a_lower_seq_that_is_open_while_a_claim_rebases_a_restored_tube_is_not_missed(
    own_database, connect_to
):
    """A claim that rebases has its transaction id before it takes its snapshot."""
    q, claiming, pausing = (connect_to(own_database) for _ in range(3))
    early, late = (connect_to(own_database, autocommit=False) for _ in range(2))
    make(q)
    touch(q, 1)
    q.execute("update q set txid = '9000000000'")
    pause_after(q, "update on q")
    pausing.execute("select pg_advisory_lock(1)")
    with ThreadPoolExecutor() as threads:
        batch = threads.submit(claim, claiming)
        until(q, waits(claiming, behind=pausing))
        early.execute("select pg_current_xact_id()")
        touch(late, 2)
        touch(early, 3)
        early.commit()
        pausing.execute("select pg_advisory_unlock(1)")
        assert changes(q, batch.result()) == [1, 3]
    ack(q, batch.result())
    late.commit()
    assert take(q) == [2]


def test_thousands_of_savepoints_hide_nothing(q, connect):
    slow = connect(autocommit=False)
    slow.execute("create table noise (n int)")
    touch(slow, 1)
    touch(q, 2)
    slow.execute(
        "do $$ begin for n in 1..20000 loop "
        "begin insert into noise values (n); exception when others then raise; end; end loop; end $$"
    )
    assert take(q) == [2]
    touch(q, 3)
    assert take(q) == [3]
    assert one(q, "select pg_column_size(snapshot) < 1000 from tube.worker")
    slow.commit()
    assert take(q) == [1]


@pytest.mark.parametrize("kind", ["T", "B"])
def test_a_late_transaction_larger_than_a_batch_is_finished_and_leaves_the_position(q, connect, kind):
    slow = connect(autocommit=False)
    for n in range(10):
        touch(slow, n, op=kind)
    touch(q, 100, op=kind)
    assert take(q) == [100]
    slow.commit()
    assert [take(q, limit=4), take(q, limit=4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    touch(q, 200, op=kind)
    assert take(q, limit=4) == [8, 9, 200]
    assert take(q) == []


def test_a_prepared_transaction_is_not_missed(q):
    q.execute("begin")
    touch(q, 1)
    q.execute("prepare transaction 'tube-claim'")
    touch(q, 2)
    assert take(q) == [2]
    q.execute("commit prepared 'tube-claim'")
    assert take(q) == [1]


def test_savepoints_are_not_missed(q, connect):
    slow = connect(autocommit=False)
    slow.execute("select 1")
    with slow.transaction():
        touch(slow, 1)
    touch(q, 2)
    assert take(q) == [2]
    with slow.transaction():
        touch(slow, 3)
    slow.commit()
    assert take(q) == [1, 3]


OTHER_SEEDS = pytest.mark.release("other chances of what one seed shows in every run")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=OTHER_SEEDS) for seed in range(1, 5))])
def test_every_pod_comes_once_in_any_order_of_commits(connect, seed):
    chance = random.Random(seed)
    q = connect()
    make(q, workers=2)
    writers = [connect(autocommit=False) for _ in range(6)]
    waits: dict[int, list[int]] = {n: [] for n in range(6)}
    expected, got, number = [], [], 0
    for _ in range(300):
        n = chance.randrange(6)
        action = chance.random()
        if action < 0.5:
            number += 1
            touch(writers[n], number, shard=chance.randrange(-3, 4), op=chance.choice("TB"))
            waits[n].append(number)
        elif action < 0.7:
            writers[n].commit()
            expected += waits[n]
            waits[n] = []
        elif action < 0.75:
            writers[n].rollback()
            waits[n] = []
        else:
            worker = chance.randrange(2)
            got += take(q, worker, 2, limit=chance.choice([1, 3, 100]))
    for n, writer in enumerate(writers):
        writer.commit()
        expected += waits[n]
    for worker in (0, 1):
        got += drain(q, worker, 2, limit=5)
    assert sorted(got) == sorted(expected)


def test_an_acked_batch_cannot_be_acked_again(q):
    touch(q, 1)
    batch = claim(q)
    ack(q, batch)
    with pytest.raises(psycopg.Error, match="not where batch") as told:
        ack(q, batch)
    assert told.value.sqlstate == "PC006"


def test_an_ack_of_pods_that_somebody_deleted_is_refused_and_the_next_claim_goes_on(q):
    touch(q, 1)
    touch(q, 2)
    batch = claim(q)
    q.execute("delete from q where ids = '{1}'")
    with pytest.raises(psycopg.Error, match="were deleted"):
        ack(q, batch)
    assert take(q) == [2]


def test_a_claim_is_refused_in_a_transaction_that_has_written(q, connect):
    q.execute("select tube.register('q', 1, 0)")
    writer = connect(autocommit=False)
    writer.execute("create table t ()")
    with pytest.raises(psycopg.Error, match="already written") as told:
        writer.execute("select tube.claim('q', 0, tube.position('q', 0), 10, 1)")
    assert told.value.sqlstate == "PC007"


def test_a_claim_from_an_old_position_is_refused(q):
    touch(q, 1)
    old = json.dumps(one(q, "select tube.register('q', 1, 0)") or one(q, "select tube.position('q', 0)"))
    take(q)
    with pytest.raises(psycopg.Error, match="not at the given position") as told:
        q.execute("select tube.claim('q', 0, %s, 10, 1)", [old])
    assert told.value.sqlstate == "PC006"


def test_a_restored_dump_is_worked_from_its_beginning(q):
    touch(q, 1)
    take(q)
    touch(q, 2)
    # Pretend that the cluster has had few transactions.
    q.execute("update q set txid = '9000000000'")
    q.execute("update tube.worker set snapshot = '9000000001:9000000001:', done = 1")
    assert take(q) == [2]
    assert take(q) == []
    touch(q, 3)
    assert take(q) == [3]


@pytest.mark.parametrize("publication", ["for all tables", "for tables in schema public"])
def test_a_published_tube_is_worked_and_changed(connect, publication):
    connection = connect()
    connection.execute(f"create publication everything {publication}")
    connection.execute("create table item (id bigint primary key, name text)")
    make(connection, workers=2)
    attach(connection)
    connection.execute("insert into item values (1, 'a'), (2, 'a')")
    connection.execute("truncate item")
    assert drain(connection, 0, 2) == [1, 2]
    (control,) = connection.execute("select seq from tube.control_pods('q', 2, 0)").fetchone()
    connection.execute("select tube.control_done('q', 2, 0, %s)", [control])
    connection.execute("insert into item values (3, 'a')")
    attach(connection, shard=1)
    attach(connection, shard=0)
    attach(connection, shard=1)
    assert one(connection, "select count(*) from tube.moved") > 0
    assert drain(connection, 0, 2) == [3]
    assert drain(connection, 1, 2) == [3]
    assert one(connection, "select count(*) from tube.moved") == 0
    make(connection, workers=1)
    connection.execute("insert into item values (4, 'a')")
    connection.execute("select tube.tube_pods_delete('q', 1, 0, array(select seq from q))")
    touch(connection, 5)
    assert take(connection) == [5]
    assert pods(connection) == []


def test_a_batch_is_acked_as_the_version_that_was_claimed(q, db):
    only_the_claimed_version_is_acked(lambda: touch(q, 1), TubeFeed("q"), db)
