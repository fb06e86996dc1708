"""The lag of a worker, and the contents of the tubes."""

from __future__ import annotations

import json

import pytest

from airflow_pgchange.admin import consumers
from airflow_pgchange.feeds import AllTubes, TubeFeed
from airflow_pgchange.feeds.consumer_state import lag as feed_lag
from airflow_pgchange.feeds.feed import NOWHERE, lags
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.tubes import work_off
from tests.tubes import attach, claim, drain, lag, make, one, take, touch


def test_an_empty_tube_has_no_lag(q):
    assert lag(q) == {
        "ready": 0, "ready_exact": True, "ready_age": None,
        "waiting": 0, "waiting_exact": True, "waiting_age": None, "faults": 0,
    }  # fmt: skip


def test_ready_is_what_a_claim_would_return_exactly_up_to_the_number_asked_about(q):
    touch(q, 1, 2)
    touch(q, 2, 3)
    touch(q, 3, 4, op="B")
    shown = lag(q)
    assert (shown["ready"], shown["ready_exact"]) == (4, True)
    assert claim(q)["count"] == 4
    assert shown["ready_age"] >= 0


def test_the_lags_of_many_workers_come_in_the_order_of_the_question(q):
    make(q, tube="shared", workers=3)
    touch(q, 1, 2, shard=1, tube="shared")
    touch(q, 3)
    take(q)
    touch(q, 4, 5, 6)
    feeds = [TubeFeed("shared", 1, 3), TubeFeed("q"), TubeFeed("shared", 2, 3), TubeFeed("shared", 1, 3)]
    counted = ask(q, lags([(feed, ask(q, feed.position()) or NOWHERE, 10) for feed in feeds]))
    assert [each["ready"] for each in counted] == [2, 3, 0, 2]
    assert counted[2] == lag(q, worker=2, workers=3, tube="shared")
    assert one(q, "select tube.lags('[]')") == []


def test_beyond_the_number_asked_about_it_is_an_estimate(q):
    q.execute("select tube.tube_pods_insert('q', 'select g, g from generate_series(1, 10000) as g', 0, 'T')")
    shown = lag(q, upto=100)
    assert shown["ready_exact"] is False
    assert 5000 < shown["ready"] < 20000


def test_the_estimate_leaves_out_what_others_get_and_counts_each_kind_of_pod_for_itself(connect):
    connection = connect()
    make(connection)
    make(connection, "other")
    fill = "select tube.touch(%s, 0, array(select generate_series(1, %s)), %s, null, 1)"
    connection.execute(fill, ["q", 300, "T"])
    connection.execute(fill, ["other", 3000, "T"])
    assert 150 <= lag(connection, upto=10)["ready"] <= 600
    connection.execute(fill, ["q", 3000, "B"])
    assert 1650 <= lag(connection, upto=10)["ready"] <= 6600


def test_another_workers_pods_are_no_lag(connect):
    connection = connect()
    make(connection, workers=2)
    touch(connection, 1, shard=1)
    assert [lag(connection, worker, 2)["ready"] for worker in (0, 1)] == [0, 1]


def test_processed_pods_are_no_lag(q):
    touch(q, 1)
    take(q)
    touch(q, 2)
    assert lag(q)["ready"] == 1


def test_control_pods_are_ready_when_their_turn_has_come(q):
    touch(q, 1)
    q.execute("""select tube.touch('q', 0, '{}', 'T', '{"type": "mine"}')""")
    shown = lag(q)
    assert (shown["ready"], shown["waiting"]) == (1, 1)
    take(q)
    shown = lag(q)
    assert (shown["ready"], shown["waiting"]) == (1, 0)


def test_faults_are_told(q):
    q.execute("create table item (id bigint primary key)")
    attach(q)
    make(q, predicate="1 / id > 0")
    q.execute("insert into item values (0)")
    shown = lag(q)
    assert (shown["faults"], shown["ready"]) == (1, 1)
    assert one(q, "select tube.clear_faults('q')") == 1
    assert lag(q)["faults"] == 0


def test_stats_tell_each_workers_pods_from_when_to_when(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key)")
    make(connection, workers=2, predicate="id > 0")
    attach(connection, shard=3)
    connection.execute("insert into item values (1)")
    touch(connection, 2, shard=1)
    touch(connection, 3, shard=1, op="B")
    connection.execute("""select tube.touch('q', 2, '{}', 'B', '{"type": "mine"}')""")
    rows = connection.execute(
        "select partition, predicate, shards, inc_count, inc_min_seq, inc_max_seq, inc_min_ts <= inc_max_ts, "
        "backfill_count, backfill_min_seq, backfill_max_seq, control_count from tube.tube_stats()"
    ).fetchall()
    assert rows == [
        (0, "id > 0", 0, "0", None, None, None, "0", None, None, "mine:1"),
        (1, "id > 0", 1, "2", 1, 2, True, "1", 3, 3, None),
    ]


def test_stats_count_what_the_transaction_itself_has_touched(q):
    q.execute("begin")
    touch(q, 1)
    touch(q, 2, op="B")
    assert q.execute(
        "select inc_count, inc_min_seq, inc_max_seq, backfill_count, backfill_max_seq from tube.tube_stats()"
    ).fetchone() == ("1", 1, 1, "1", 2)
    q.execute("rollback")
    assert q.execute("select inc_count, backfill_count from tube.tube_stats()").fetchone() == ("0", "0")


def test_stats_list_control_pods_by_their_type(q):
    for kind in ("backfill_start", "backfill_end", "backfill_end", "its own", None):
        q.execute(
            "select tube.touch('q', 0, '{}', 'T', jsonb_strip_nulls(jsonb_build_object('type', %s::text, 'n', 1)))",
            [kind],
        )
    assert one(q, "select control_count from tube.tube_stats()") == (
        "backfill_end:2 backfill_start:1 control:1 its own:1"
    )


def test_stats_count_no_further_than_a_thousand(q):
    q.execute("select tube.touch('q', 0, array(select generate_series(1, 3000)), 'T', null, 1)")
    row = q.execute("select inc_count, inc_min_seq, inc_max_seq from tube.tube_stats()").fetchone()
    assert row == ("1000+", 1, 3000)


def scanned(connection, query):
    """Return the rows that a statement reads in scans of the pods, also inside functions."""
    connection.execute("select pg_stat_force_next_flush()")
    before = one(
        connection, "select idx_tup_fetch + seq_tup_read from pg_stat_user_tables where relname = 'q'"
    )
    connection.execute(query)
    connection.execute("select pg_stat_force_next_flush()")
    after = one(
        connection, "select idx_tup_fetch + seq_tup_read from pg_stat_user_tables where relname = 'q'"
    )
    return after - before


def test_nothing_steps_over_the_backlog_or_over_another_workers(connect):
    connection = connect()
    make(connection, workers=2)
    for worker in (0, 1):
        connection.execute("select tube.register('q', 2, %s)", [worker])
    connection.execute("select tube.touch('q', 0, array(select generate_series(1, 20000)), 'T', null, 1)")
    position = json.dumps(one(connection, "select tube.position('q', 0)"))
    assert scanned(connection, f"select tube.lag('q', 2, 0, '{position}', 100)") < 300
    assert scanned(connection, f"select tube.lag('q', 2, 1, '{position}', 100)") < 10
    assert scanned(connection, "select tube.claim('q', 1, tube.position('q', 1), 100, 2)") < 10
    assert scanned(connection, "select tube.claim('q', 0, tube.position('q', 0), 100, 2)") < 600
    assert scanned(connection, "select * from tube.tube_stats()") < 6000


def test_dead_rows_of_pods_that_an_old_snapshot_keeps_are_not_read(connect):
    connection = connect()
    make(connection)
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")
    old.execute("select 1 from q")
    connection.execute("select tube.touch('q', 0, array(select generate_series(1, 5000)), 'T', null, 1)")
    assert len(take(connection, limit=5000)) == 5000
    query = one(connection, "select tube.tube_pods_sql('q', 1, 0)")
    for n in range(3):
        touch(connection, n)
        position = json.dumps(one(connection, "select tube.position('q', 0)"))
        assert lag(connection)["ready"] == 1
        blocks = [
            buffers(connection, statement)
            for statement in (
                f"select tube.lag('q', 1, 0, '{position}', 100)",
                query,
                "select * from tube.tube_stats()",
                "select tube.claim('q', 0, tube.position('q', 0), 100, 1)",
            )
        ]
        assert max(blocks) < 800, blocks
        assert take(connection) == [n]


def buffers(connection, query):
    plan = one(connection, f"explain (analyze, buffers, format json, timing off) {query}")[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def all_tubes(connection, upto=1):
    return feed_lag(connection, connection, AllTubes(), upto)


def test_all_tubes_together_have_what_is_ready_for_any_worker(connect):
    connection = connect()
    assert all_tubes(connection).ready == 0
    make(connection, "early", workers=3)
    touch(connection, 1, shard=2, tube="early")
    assert all_tubes(connection).ready == 1
    make(connection, "late")
    touch(connection, 1, 2, tube="late")
    assert all_tubes(connection, 100).ready == 3
    assert all_tubes(connection, 100).ready_exact


def test_of_all_tubes_what_a_worker_is_at_work_on_is_not_ready(connect):
    connection, worker = connect(), connect(autocommit=False)
    make(connection, workers=2)
    touch(connection, 1, shard=0)
    touch(connection, 2, 3, shard=1)
    worker.execute("select tube.take_lock('q', 1)")
    assert all_tubes(connection, 100).ready == 1
    worker.rollback()
    assert all_tubes(connection, 100).ready == 3


def test_of_all_tubes_a_worker_whose_batch_has_failed_rests_longer_each_time_and_the_others_do_not(connect):
    connection = connect()
    make(connection, workers=2)
    touch(connection, 1, shard=0)
    touch(connection, 2, 3, shard=1)
    for rest in (30, 60, 120, 240, 300, 300):
        batch = claim(connection, worker=0, workers=2)
        connection.execute(
            "update tube.worker set claimed_at = now() - interval '1 day' where batch is not null"
        )
        connection.execute("select tube.note_failure('q', 0, %s, 'it fails')", [json.dumps(batch)])
        ready = []
        for seconds in (rest - 15, rest + 1):
            connection.execute(
                "update tube.worker set updated_at = now() - make_interval(secs => %s) where batch is not null",
                [seconds],
            )
            ready.append(all_tubes(connection, 100).ready)
        assert ready == [2, 3]


def test_of_all_tubes_a_worker_rests_from_when_it_failed_and_not_from_when_it_began(connect):
    connection = connect()
    make(connection)
    touch(connection, 1)
    batch = claim(connection)
    connection.execute(
        "update tube.worker set claimed_at = now() - interval '1 day', updated_at = now() - interval '1 day'"
    )
    assert all_tubes(connection).ready == 1
    connection.execute("select tube.note_failure('q', 0, %s, 'it fails')", [json.dumps(batch)])
    assert all_tubes(connection).ready == 0


def fail(control):
    raise RuntimeError("the search index is down")


def controls_failed(connection, seconds):
    connection.execute(
        "update tube.worker set control_failed_at = now() - make_interval(secs => %s)", [seconds]
    )


@pytest.fixture
def failing(q, db):
    """A tube with a control pod on which its worker has failed. The worker has no other work."""
    q.execute("""select tube.touch('q', 0, '{}', 'T', '{"type": "mine"}')""")
    assert all_tubes(q).ready == 1
    with pytest.raises(RuntimeError, match="search index"):
        work_off(TubeFeed("q"), db, fail)
    return q


def test_of_all_tubes_a_worker_whose_control_pods_fail_rests_longer_each_time(failing, db):
    assert all_tubes(failing).ready == 0
    for rest in (30, 60, 120):
        ready = []
        for seconds in (rest - 15, rest + 1):
            controls_failed(failing, seconds)
            ready.append(all_tubes(failing).ready)
        assert ready == [0, 1]
        with pytest.raises(RuntimeError, match="search index"):
            work_off(TubeFeed("q"), db, fail)


def test_of_all_tubes_pods_do_not_wait_for_control_pods_that_fail(failing):
    touch(failing, 1)
    assert all_tubes(failing).ready > 0


def test_a_role_that_may_only_touch_a_tube_sees_that_its_control_pods_fail(failing, role, connect_to):
    toucher = role("toucher")
    failing.execute(f"select tube.grant_consumer('{toucher.name}'); grant insert on q to {toucher.name}")
    told = (
        connect_to(toucher.conninfo)
        .execute("select told from tube.health(1) as h(s, l, c, told, call)")
        .fetchall()
    )
    assert ["control pods have failed" in line for (line,) in told] == [True]


@pytest.mark.parametrize("by_hand", [False, True])
def test_control_pods_that_fail_again_behind_a_batch_are_counted_on(failing, db, by_hand):
    touch(failing, 1)
    if by_hand:
        failing.execute("select tube.tube_pods_delete('q', 1, 0, array(select seq from q where ids <> '{}'))")
    else:
        assert take(failing) == [1]
    assert all_tubes(failing).ready == 0
    with pytest.raises(RuntimeError, match="search index"):
        work_off(TubeFeed("q"), db, fail)
    assert one(failing, "select control_attempt from tube.worker") == 2


def test_of_all_tubes_control_pods_that_are_worked_off_are_as_if_they_had_never_failed(failing, db):
    work_off(TubeFeed("q"), db, lambda control: None)
    failing.execute("""select tube.touch('q', 0, '{}', 'T', '{"type": "mine"}')""")
    assert all_tubes(failing).ready == 1


def planned(connection, query):
    """Return for how many workers a query counted the pods.

    Counting is expensive, because it plans queries for each worker.
    """
    connection.execute("set track_functions = 'all'; select pg_stat_force_next_flush()")
    connection.execute("select pg_stat_reset()")
    connection.execute(query)
    connection.execute("select pg_stat_force_next_flush()")
    query = "select coalesce(sum(calls), 0) from pg_stat_user_functions where funcname = 'count_unread'"
    return int(one(connection, query))


@pytest.mark.parametrize("look", ["select tube.lag_of_idle(1000)", "select * from tube.status()"])
def test_a_worker_without_pods_costs_a_look_over_all_of_them_next_to_nothing(connect, look):
    connection = connect()
    make(connection, "a", workers=8)
    make(connection, "b", workers=8)
    assert planned(connection, look) == 0
    touch(connection, 1, shard=3, tube="a")
    touch(connection, 1, shard=5, op="B", tube="b")
    connection.execute("""select tube.touch('b', 6, '{}', 'T', '{"type": "mine"}')""")
    assert planned(connection, look) == 3
    assert all_tubes(connection, 1000).ready == 3
    rows = connection.execute(
        "select feed ->> 'tube', (feed ->> 'worker')::int from tube.status() where ready > 0"
    ).fetchall()
    assert rows == [("a", 3), ("b", 5), ("b", 6)]


@pytest.mark.parametrize(("done", "reads"), [("7:7:", 1), ("7:9:7", 2)])
def test_a_worker_reads_late_transactions_only_where_there_are_any(q, done, reads):
    """Half of the cost of checking an idle worker is the planning of this query."""
    position = json.dumps({"incremental": [done, 0]})
    query = "select tube.unread_sql(t, 0, 'incremental', %s, null) from tube.tube as t"
    plan = q.execute(f"explain (format json) {one(q, query, position)}").fetchone()[0]
    assert json.dumps(plan).count('"Relation Name"') == reads


@pytest.mark.parametrize("op", ["T", "B"])
def test_of_all_tubes_a_pod_that_was_committed_behind_its_worker_is_ready(connect, op):
    connection, late = connect(), connect(autocommit=False)
    make(connection)
    touch(late, 1, op=op)
    touch(connection, 2, op=op)
    assert take(connection) == [2]
    late.commit()
    assert all_tubes(connection, 1000).ready == 1
    assert [row["ready"] for row in consumers.status(connection)] == [1]
    assert take(connection) == [1]


def test_the_faults_of_all_tubes_are_counted_once_however_many_workers_share_one(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key)")
    make(connection, workers=4)
    attach(connection)
    connection.execute("insert into tube.fault (tube, tbl, ids, message) values ('q', 'item', 1, 'told')")
    assert all_tubes(connection, 1000).faults == 1
    assert [row["faults"] for row in consumers.status(connection)] == [1, 1, 1, 1]


def test_all_tubes_count_no_further_than_they_are_asked(connect):
    connection = connect()
    for tube in ("a", "b"):
        make(connection, tube)
        touch(connection, *range(50), tube=tube)
    assert not all_tubes(connection, 10).ready_exact


def test_all_tubes_position_moves_with_each_batch_of_any_worker(connect):
    connection = connect()
    make(connection, workers=2)
    touch(connection, 1, shard=1)
    before = ask(connection, AllTubes().position())
    assert take(connection, worker=1, workers=2) == [1]
    assert ask(connection, AllTubes().position()) != before
    assert ask(connection, AllTubes().locked()) is False


def test_a_worker_that_has_a_control_pod_alone_has_something_to_do(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key)")
    make(connection)
    attach(connection)
    connection.execute("insert into item values (1); truncate item; insert into item values (2)")
    drain(connection)
    assert one(connection, "select count(*) from tube.tube as t, tube.workers_with_pods(t)") == 1
