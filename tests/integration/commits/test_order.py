"""The commits of a batch, and their order."""

from __future__ import annotations

import pytest

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.feed import partitions
from tests.commits import FEED, commits, drain

IN_ORDER = CommitFeed("in order", 0, in_order=True)


def test_in_order_means_by_transaction_and_not_by_writing(db, connect):
    early, late = connect(autocommit=False), connect()
    early.execute("select pg_current_xact_id()")
    written_first = commits(late)
    written_last = commits(early)
    early.commit()
    assert drain(db, feed=IN_ORDER) == written_last + written_first


def test_commits_of_an_open_transaction_come_before_those_of_later_transactions(db, connect):
    slow, slower, fast = (connect(autocommit=False) for _ in range(3))
    slow.execute("select pg_current_xact_id()")
    slower.execute("select pg_current_xact_id()")
    between = commits(fast)
    fast.commit()
    assert drain(db) == between
    second, first = commits(slower), commits(slow)
    slow.commit()
    slower.commit()
    last = commits(fast)
    fast.commit()
    assert drain(db) == first + second + last


def test_commits_of_savepoints_belong_to_the_whole_transaction(db, connect):
    connection = connect(autocommit=False)
    expected = commits(connection)
    connection.execute("savepoint s")
    expected += commits(connection)
    connection.execute("release s")
    connection.execute("savepoint t")
    expected += commits(connection)
    assert drain(db) == []
    connection.commit()
    assert drain(db) == expected


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_prepared_transaction_comes_when_it_is_committed(db, connect, end):
    connection, other = connect(), connect()
    connection.execute("begin")
    prepared = commits(connection)
    connection.execute("prepare transaction 'order'")
    expected = commits(other, 2)
    assert drain(db) == expected
    connection.execute(f"{end} prepared 'order'")
    assert drain(db) == (prepared if end == "commit" else [])


def test_a_transaction_of_another_database_holds_an_in_order_consumer_back_and_is_named(
    db, bare_db, connect, connect_to
):
    connection, foreign = connect(), connect_to(bare_db, autocommit=False)
    foreign.execute("select pg_current_xact_id()")
    connection.execute("select pubsub.register('in order', 0, in_order => true)")
    expected = commits(connection)
    assert drain(db, feed=IN_ORDER) == []
    told = connection.execute("select held_back_by from pubsub.status()").fetchone()[0]
    assert f"database {foreign.info.dbname}" in told
    foreign.rollback()
    assert drain(db, feed=IN_ORDER) == expected


def test_a_transaction_read_in_part_is_not_left_where_its_rest_cannot_be_seen(db, connect):
    slow, connection = connect(autocommit=False), connect()
    txid = slow.execute("select pg_current_xact_id()::text::bigint").fetchone()[0]
    commits(connection, 3)
    # Pretend that this server lags: a transaction is still open here, although another server has shown a part of it.
    at = f'{{"snapshot": "{txid}:{txid}:", "partial": [{txid}, 1]}}'
    assert connection.execute("select pubsub.choose(0, %s, 10, false)", [at]).fetchone() == (None,)
    slow.commit()
    assert connection.execute("select pubsub.choose(0, %s, 10, false)", [at]).fetchone()[0]["count"] == 3


def test_a_late_transaction_read_in_part_is_finished_once(db, connect):
    slow, fast = connect(autocommit=False), connect()
    late = commits(slow, 5)
    early = commits(fast, 2)
    feeds = {limit: CommitFeed(f"limit {limit}", 0) for limit in (1, 2, 3)}
    assert [drain(db, feed=feed) for feed in feeds.values()] == [early] * 3
    slow.commit()
    new = commits(fast, 3)
    for limit, feed in feeds.items():
        with ConsumerTransaction(feed, db) as consumer:
            consumer.claim(limit)
            assert [change.id for change in consumer.changes()] == late[:limit], limit
            consumer.ack()
        assert lag(fast, fast, feed, 100).ready == 8 - limit
        assert drain(db, feed=feed, limit=limit) == late[limit:] + new, limit
        assert drain(db, feed=feed) == []


def test_progress_never_goes_back_where_a_server_lags_behind_another(db, connect):
    connection = connect(autocommit=False)
    txid = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()[0]
    commits(connection, 3)
    connection.commit()
    # Pretend that another server has shown this consumer the next thousand transactions except this one transaction.
    at = f'{{"snapshot": "{txid}:{txid + 1000}:{txid}"}}'
    choice = connection.execute("select pubsub.choose(0, %s, 10, false)", [at]).fetchone()[0]
    assert choice["count"] == 3
    assert choice["bounds"]["upto"]["snapshot"] == f"{txid + 1000}:{txid + 1000}:"


def test_a_consumer_gets_the_commits_of_its_own_branch_early_and_late(db, connect):
    connection, slow = connect(), connect(autocommit=False)
    query = "insert into revision.branch (type) values ('stable') returning id"
    stable = connection.execute(query).fetchone()[0]
    insert = "insert into revision.commit (branch_id) values (%s), (0) returning id"
    late = [row[0] for row in slow.execute(insert, [stable]).fetchall()]
    early = [row[0] for row in connection.execute(insert, [stable]).fetchall()]
    feeds = [CommitFeed("test", stable), CommitFeed("test", 0)]
    assert [drain(db, feed=feed) for feed in feeds] == [[early[0]], [early[1]]]
    slow.commit()
    assert [drain(db, feed=feed) for feed in feeds] == [[late[0]], [late[1]]]


def test_the_order_comes_from_the_index_whatever_the_planner_thinks_of_it(connect):
    connection = connect()
    connection.execute("insert into revision.commit select from generate_series(1, 50000)")
    connection.execute("set random_page_cost = 1000000")
    connection.execute("set cpu_index_tuple_cost = 1000000")
    connection.execute("set work_mem = 64")
    spilled = "select temp_bytes from pg_stat_database where datname = current_database()"
    connection.execute("select pg_stat_force_next_flush()")
    before = connection.execute(spilled).fetchone()
    for _ in range(3):
        connection.execute("select pubsub.choose(0, '{}', 10, false)")
        connection.execute("select pubsub.lag(0, '{}', 10, false)")
        connection.execute("""
            select pubsub.lags('[{"branch_id": 0, "position": {}, "upto": 10, "in_order": true},
                                 {"branch_id": 0, "position": {}, "upto": 10, "in_order": false}]')""")
    connection.execute("select pg_stat_force_next_flush()")
    assert connection.execute(spilled).fetchone() == before


def test_a_big_batch_is_described_by_a_few_slices_that_are_all_of_it(db, connect):
    connection = connect()
    expected = commits(connection, 25_000)
    with ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(1_000_000)
        assert [part.count for part in batch.slices] == [10_000, 10_000, 5_000]
        got = []
        for part in partitions(FEED, batch, 2):
            got.append([row[0] for row in connection.execute(part.query).fetchall()])
            assert len(got[-1]) == part.count
        consumer.ack()
    assert [commit for part in got for commit in part] == expected
    connection.execute("select pubsub.lock_watermark('hand', 0)")
    polled = connection.execute("select id from pubsub.poll('hand', 0, 1000000)").fetchall()
    assert [row[0] for row in polled] == expected


def test_numbers_of_the_queue_are_handed_out_one_by_one(connect):
    cached = connect().execute(
        "select cache_size from pg_sequences where schemaname = 'revision' and sequencename like 'commit_queue%'"
    )
    assert cached.fetchall() == [(1,)]
