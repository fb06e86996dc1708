"""Reading and deleting pods by SQL."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.tubes import make, one, pods, take, touch
from tests.waiting import pause_after, until, waits


def test_by_hand_too_whatever_the_order_of_commits_every_pod_comes_once(q, connect):
    chance = random.Random(7)
    writers = [connect(autocommit=False) for _ in range(5)]
    query = one(q, "select tube.tube_pods_sql('q', 1, 0)")
    waits: dict[int, list[int]] = {n: [] for n in range(5)}
    expected, got = [], []

    def work(limit):
        rows = q.execute(f"{query} limit {limit}").fetchall()
        assert [row[1] == "B" for row in rows] == sorted(row[1] == "B" for row in rows)
        own = writers[0] if chance.random() < 0.3 else q
        assert one(own, "select tube.tube_pods_delete('q', 1, 0, %s)", [row[0] for row in rows]) == len(rows)
        if own is not q:
            # The transaction also touches the tube before and after it reads.
            touch(own, 5000 + len(expected))
            expected.append(5000 + len(expected))
            expected.extend(waits[0])
            waits[0] = []
            own.commit()
        got.extend(each for row in rows for each in row[3])
        return rows

    for number in range(400):
        n = chance.randrange(5)
        action = chance.random()
        if action < 0.6:
            touch(writers[n], number, op=chance.choice("TB"))
            waits[n].append(number)
        elif action < 0.8:
            writers[n].commit()
            expected += waits[n]
            waits[n] = []
        else:
            work(chance.choice([1, 3, 100]))
    for n, writer in enumerate(writers):
        writer.commit()
        expected += waits[n]
        waits[n] = []
    while work(50):
        pass
    assert sorted(got) == sorted(expected)


def test_by_hand_pods_are_read_from_where_deleting_has_come(q):
    for n in range(10):
        touch(q, n)
    touch(q, 100, op="B")
    q.execute("""select tube.touch('q', 0, '{}', 'T', '{"type": "mine"}')""")
    query = one(q, "select tube.tube_pods_sql('q', 1, 0)")
    assert [row[0] for row in q.execute(f"{query} limit 3")] == [1, 2, 3]
    assert one(q, "select tube.tube_pods_delete('q', 1, 0, '{1,2,3,11}')") == 4
    assert one(q, "select done from tube.worker") == 3
    assert [row[0] for row in q.execute(query)] == [4, 5, 6, 7, 8, 9, 10, 12]
    assert one(q, "select tube.tube_pods_delete('q', 1, 0, '{4,5,6,7,8,9,10}')") == 7
    # A control pod cannot be skipped by SQL.
    assert [row[4] for row in q.execute(query)] == [{"type": "mine"}]


def test_by_hand_backfill_pods_may_be_left_out(q):
    touch(q, 1, op="B")
    touch(q, 2)
    rows = q.execute(one(q, "select tube.tube_pods_sql('q', 1, 0, true)")).fetchall()
    assert [(row[1], row[3]) for row in rows] == [("T", [2])]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_by_hand_every_number_of_workers_shares_the_pods_out(q, workers):
    make(q, workers=2)
    for n in range(-5, 6):
        touch(q, n, shard=n)
    got = []
    for worker in range(workers):
        query = one(q, "select tube.tube_pods_sql('q', %s, %s)", workers, worker)
        rows = q.execute(query).fetchall()
        got += [row[3][0] for row in rows]
        assert one(
            q, "select tube.tube_pods_delete('q', %s, %s, %s)", workers, worker, [row[0] for row in rows]
        ) == len(rows)
    assert sorted(got) == list(range(-5, 6))
    assert pods(q) == []


def test_by_hand_a_worker_cannot_delete_anothers_pods(q):
    make(q, workers=2)
    touch(q, 1, shard=1)
    assert one(q, "select tube.tube_pods_delete('q', 2, 0, '{1}')") == 0
    assert one(q, "select tube.tube_pods_delete('q', 2, 1, '{1}')") == 1


def test_pods_whose_deletion_by_hand_is_rolled_back_come_again(q, connect):
    touch(q, 1)
    worker = connect(autocommit=False)
    query = one(worker, "select tube.tube_pods_sql('q', 1, 0)")
    assert one(worker, "select tube.tube_pods_delete('q', 1, 0, '{1}')") == 1
    worker.rollback()
    assert len(q.execute(query).fetchall()) == 1


def test_a_pod_that_is_touched_while_a_worker_moves_on_by_hand_is_not_missed(q, connect):
    deleting, pausing, late = connect(), connect(), connect(autocommit=False)
    touch(q, 1)
    pause_after(q, "insert on tube.worker")
    pausing.execute("select pg_advisory_lock(1)")
    with ThreadPoolExecutor() as threads:
        deleted = threads.submit(one, deleting, "select tube.tube_pods_delete('q', 1, 0, '{1}')")
        until(q, waits(deleting, behind=pausing))
        touch(late, 2)
        pausing.execute("select pg_advisory_unlock(1)")
        assert deleted.result() == 1
    late.commit()
    assert take(q) == [2]


def put_in_another_cluster(connection):
    """Pretend that all pods except the first were written by transactions that this cluster has not reached."""
    for each in range(1, 7):
        touch(connection, each)
    connection.execute("update q set txid = (txid::text::bigint + 1000000)::text::xid8 where ids <> '{1}'")


@pytest.mark.parametrize("writes", [False, True])
def test_by_hand_nothing_is_lost_behind_a_restore(q, writes):
    connection = q
    put_in_another_cluster(connection)
    query = one(connection, "select tube.tube_pods_sql('q', 1, 0)")
    with connection.transaction():
        if writes:
            touch(connection, 7)
        first = connection.execute(query + " limit 4").fetchall()
        assert [pod[3] for pod in first] == [[1], [2], [3], [4]]
        seqs = [pod[0] for pod in first]
        connection.execute("select tube.tube_pods_delete('q', 1, 0, %s)", [seqs])
        if writes:
            assert one(connection, "select count(*) from q where txid = pg_current_xact_id()") == 1
    left = connection.execute(query).fetchall()
    assert [pod[3] for pod in left] == [[5], [6], *([[7]] if writes else [])]
    connection.execute("select tube.tube_pods_delete('q', 1, 0, %s)", [[left[0][0]]])
    assert [pod[3] for pod in connection.execute(query).fetchall()] == [pod[3] for pod in left[1:]]


def test_by_hand_who_may_not_mend_a_restored_tube_is_refused(q, role):
    put_in_another_cluster(q)
    hand = role("hand").name
    q.execute(f"grant select, delete on q to {hand}; select tube.grant_consumer('{hand}')")
    q.execute(f"set role {hand}")
    with pytest.raises(psycopg.DatabaseError, match="was restored from another cluster") as told:
        q.execute("select tube.tube_pods_delete('q', 1, 0, array(select min(seq) from q))")
    assert told.value.sqlstate == "PC004"
    assert one(q, "select count(*) from q") == 6


@pytest.mark.parametrize("workers", [1, 4, 64])
def test_pods_that_a_worker_reads_by_hand_are_never_sorted(connect, workers):
    """Neither the cost of a page nor an analyze of the pods changes the plan."""
    connection = connect()
    make(connection, workers=workers)
    connection.execute(
        "insert into q (op, shard, ids) select case when g % 10 = 0 then 'B' else 'T' end, g, array[g] "
        "from generate_series(1, 20000) as g"
    )
    query = one(connection, "select tube.tube_pods_sql('q', %s, %s)", workers, workers - 1)
    for analyzed in (False, True):
        if analyzed:
            connection.execute("analyze q")
        for page_cost in (1, 4, 100):
            connection.execute(f"set random_page_cost = {page_cost}")
            goes_along_the_index(connection, query)


def goes_along_the_index(connection, query):
    rows = connection.execute(f"explain (analyze, timing off) {query} limit 100").fetchall()
    plan = "\n".join(line for (line,) in rows)
    sorted_rows = [
        int(actual["rows"].partition(".")[0])
        for (line,) in rows
        if re.search(r"-> +(Incremental )?Sort ", line)
        and (actual := re.search(r"actual rows=(?P<rows>[\d.]+)", line))
    ]
    assert set(sorted_rows) <= {0}, plan
    assert "_workers_idx" in plan
    assert len(connection.execute(f"{query} limit 100").fetchall()) == 100


def test_a_query_of_ones_own_goes_along_an_index_of_ones_own(connect):
    connection = connect()
    make(connection, workers=4)
    connection.execute("create index on q ((shard % 4), (op = 'B'), seq)")
    connection.execute(
        "insert into q (op, shard, ids) select case when g % 10 = 0 then 'B' else 'T' end, g, array[g] "
        "from generate_series(1, 100000) as g"
    )
    connection.execute("analyze q")
    for page_cost in (1, 4):
        connection.execute(f"set random_page_cost = {page_cost}")
        query = "select * from q where shard % 4 = 2 order by op = 'B', seq limit 100"
        plan = "\n".join(line for (line,) in connection.execute(f"explain {query}"))
        assert "Sort" not in plan
    assert take(connection, 2, 4, limit=3) == [2, 6, 14]


def test_who_deletes_by_hand_in_a_restored_dump_counts_on_from_the_batches_before(q):
    touch(q, 1)
    assert take(q) == [1]
    touch(q, 2)
    touch(q, 3)
    # After a restore of a dump, the pods' transactions are ahead of this cluster.
    q.execute("update q set txid = (txid::text::bigint + 1000000)::text::xid8")
    ((seq,),) = q.execute("select seq from q where ids <> '{}' limit 1").fetchall()
    before = q.execute("select version from tube.worker where tube = 'q'").fetchall()
    assert one(q, "select tube.tube_pods_delete('q', 1, 0, %s)", [seq]) == 1
    assert q.execute("select version from tube.worker where tube = 'q'").fetchall() == before
