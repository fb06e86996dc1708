"""Claim, ack and retry of batches of the commit queue."""

from __future__ import annotations

import pytest

from airflow_pgchange.errors import (
    BatchNotFinished,
    HistoryTrimmed,
    InvalidArgument,
    PermissionDenied,
    SchemaMissing,
    SchemaVersionMismatch,
    ServerUnavailable,
    UnknownBranch,
)
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.consumer_state import lag, position
from tests.commits import FEED, commits, drain, narrow_partitions, use_up_transactions
from tests.waiting import locks


def claim_and_fail(db, limit, feed=FEED):
    class Failed(Exception):
        pass

    with pytest.raises(Failed), ConsumerTransaction(feed, db) as consumer:
        batch = consumer.claim(limit)
        changes = [change.id for change in consumer.changes()]
        raise Failed
    return batch, changes


def test_a_new_consumer_gets_every_commit_there_ever_was_once(db, connect):
    connection = connect()
    expected = commits(connection, 5) + commits(connection, 3)
    assert drain(db) == expected
    assert drain(db) == []


@pytest.mark.parametrize("in_order", [False, True])
def test_batches_of_any_size_give_each_commit_once(db, connect, in_order):
    connection = connect()
    expected = [one for n in (3, 1, 4, 2) for one in commits(connection, n)]
    for limit in (1, 2, 3, 4, 100):
        feed = CommitFeed(f"limit {limit}", 0, in_order=in_order)
        assert drain(db, feed=feed, limit=limit) == expected, limit


def test_full_batches_are_full(db, connect):
    connection = connect()
    for n in (3, 1, 8, 2):
        commits(connection, n)
    sizes = []
    while True:
        with ConsumerTransaction(FEED, db) as consumer:
            batch = consumer.claim(5)
            if batch is None:
                break
            sizes.append(batch.count)
            consumer.ack()
    assert sizes == [5, 5, 4]


def test_a_commit_of_a_transaction_that_ends_late_is_not_lost(db, connect):
    slow, fast = connect(autocommit=False), connect()
    late = commits(slow)
    early = commits(fast, 2)
    assert drain(db) == early
    slow.commit()
    assert drain(db) == late
    assert drain(db) == []


def test_an_in_order_consumer_waits_for_the_open_transaction(db, connect):
    slow, fast = connect(autocommit=False), connect()
    before = commits(fast)
    late = commits(slow)
    early = commits(fast, 2)
    feed = CommitFeed("test", 0, in_order=True)
    assert drain(db, feed=feed) == before
    behind = lag(fast, fast, feed, 10)
    assert (behind.ready, behind.waiting) == (0, 2)
    slow.commit()
    assert drain(db, feed=feed) == late + early


def test_a_transaction_read_in_part_is_finished_before_a_late_one(db, connect):
    slow, fast = connect(autocommit=False), connect()
    late = commits(slow, 2)
    big = commits(fast, 10)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(4)
        consumer.ack()
    slow.commit()
    assert drain(db, limit=4) == big[4:] + late
    assert drain(db) == []


def test_a_retry_is_the_same_batch_after_new_and_late_commits(db, connect):
    slow, fast = connect(autocommit=False), connect()
    late = commits(slow)
    first = commits(fast, 4)
    batch, changes = claim_and_fail(db, 3)
    slow.commit()
    rest = commits(fast, 4)
    again, changes_again = claim_and_fail(db, 100)
    assert (again.id, changes_again, again.attempt) == (batch.id, changes, 2)
    assert changes == first[:3]
    assert sorted(drain(db)) == sorted(late + first + rest)


def test_another_batch_has_another_id(db, connect):
    connection = connect()
    commits(connection, 2)
    ids = set()
    for _ in range(2):
        with ConsumerTransaction(FEED, db) as consumer:
            ids.add(consumer.claim(1).id)
            consumer.ack()
    assert len(ids) == 2


def test_a_block_without_ack_keeps_nothing_and_says_so(db, connect):
    commits(connect())
    with pytest.raises(BatchNotFinished, match="without ack"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
    assert len(drain(db)) == 1


def test_a_busy_consumer_is_an_answer(db, connect):
    commits(connect())
    with ConsumerTransaction(FEED, db) as first:
        assert not first.busy
        with ConsumerTransaction(FEED, db) as second:
            assert second.busy
        with ConsumerTransaction(FEED, db, busy_timeout=0.05) as third:
            assert third.busy
        with ConsumerTransaction(CommitFeed("other", 0), db) as other:
            assert not other.busy


@pytest.mark.parametrize("way", ["db", "pgbouncer"])
def test_a_batch_in_work_holds_the_advisory_lock_and_nothing_else_and_outlives_the_idle_timeout(
    request, db, connect, way
):
    connection = connect()
    expected = commits(connection, 3)
    name = connection.info.dbname
    connection.execute(f"alter database \"{name}\" set idle_in_transaction_session_timeout = '2s'")
    with ConsumerTransaction(FEED, request.getfixturevalue(way)) as consumer:
        consumer.claim(10)
        assert [change.id for change in consumer.changes()] == expected
        for _ in range(10):
            consumer.ping()
        [pid] = [lock.pid for lock in locks(connection) if lock.kind == "advisory"]
        assert sorted(lock.kind for lock in locks(connection, pid)) == ["advisory", "virtualxid"]
        busy = "select backend_xid, backend_xmin, state from pg_stat_activity where pid = %s"
        assert connection.execute(busy, [pid]).fetchall() == [(None, None, "idle in transaction")]
        connection.execute("select pg_sleep(2.5)")
        consumer.ack()
    assert drain(db) == []


def test_it_works_behind_a_pooler_in_transaction_mode(db, connect, pgbouncer):
    connection = connect()
    expected = commits(connection, 5)
    got = []
    while True:
        with ConsumerTransaction(FEED, pgbouncer) as consumer:
            if consumer.claim(2) is None:
                break
            got += [change.id for change in consumer.changes()]
            for _ in range(10):
                consumer.ping()
            idle = connection.execute(
                "select count(*) from pg_stat_activity where state = 'idle in transaction' "
                "and backend_xid is null and backend_xmin is null and datname = current_database()"
            ).fetchone()
            assert idle == (1,)
            consumer.ack()
    assert got == expected


def test_lag_counts_exactly_up_to_the_number_asked_about(db, connect):
    connection = connect()
    commits(connection, 30)
    assert lag(connection, connection, FEED, 30).ready == 30
    beyond = lag(connection, connection, FEED, 10)
    assert beyond.ready > 10
    assert not beyond.ready_exact
    drain(db, limit=7)
    assert lag(connection, connection, FEED, 10).ready == 0


@pytest.mark.parametrize("others", [0, 9])
def test_more_than_is_counted_is_an_estimate_within_a_factor_of_two_beside_other_branches(connect, others):
    connection = connect()
    (branch,) = connection.execute(
        "insert into revision.branch (type) values ('stable') returning id"
    ).fetchone()
    feed = CommitFeed("test", branch)
    for _ in range(100):
        connection.execute(
            "insert into revision.commit (branch_id)"
            " select case when n > 30 then 0 else %s end from generate_series(1, 30 + 30 * %s) as n",
            [branch, others],
        )
    found = lag(connection, connection, feed, 1000)
    assert not found.ready_exact
    assert 1500 <= found.ready <= 6000


def test_lag_reads_no_more_than_the_number_asked_about(connect):
    connection = connect()
    commits(connection, 3000)
    connection.execute("analyze revision.commit_queue")
    with connection.transaction():
        assert lag(connection, connection, FEED, 10).ready > 10
        (read,) = connection.execute(
            "select sum(seq_tup_read + idx_tup_fetch) from pg_stat_xact_user_tables "
            "where schemaname = 'revision' and relname like 'commit_queue%'"
        ).fetchone()
    assert read <= 50


def test_lag_in_the_middle_of_a_transaction_counts_its_rest(db, connect):
    connection = connect()
    commits(connection, 10)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(4)
        consumer.ack()
    assert lag(connection, connection, FEED, 100).ready == 6


def test_out_of_order_shows_what_was_processed_above_the_watermark(db, connect):
    slow, fast = connect(autocommit=False), connect()
    late = commits(slow)
    early = commits(fast, 2)
    drain(db)
    shown = fast.execute("select commit_id from pubsub.out_of_order where consumer_id = 'test'").fetchall()
    assert [row[0] for row in shown] == early
    slow.commit()
    assert drain(db) == late
    assert fast.execute("select count(*) from pubsub.out_of_order where consumer_id = 'test'").fetchone() == (
        0,
    )


def test_out_of_order_shows_what_was_processed_of_a_transaction_that_is_not_done(db, connect):
    connection = connect()
    ids = commits(connection, 5)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(2)
        consumer.ack()
    shown = connection.execute("select commit_id from pubsub.out_of_order order by 1").fetchall()
    assert [row[0] for row in shown] == ids[:2]


def test_a_stricter_isolation_is_refused(connect):
    connection = connect()
    with pytest.raises(Exception, match="read committed"), connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select pubsub.lock_watermark('hand', 0)")


def test_an_unknown_branch_says_how_to_list_them(db):
    with (
        pytest.raises(UnknownBranch, match=r"revision\.branch"),
        ConsumerTransaction(CommitFeed("x", 99), db) as c,
    ):
        c.claim(1)


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_below_one_is_refused(db, limit):
    with pytest.raises(InvalidArgument, match="at least 1"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(limit)


def test_a_database_without_the_schemas_says_what_to_run(bare_db):
    with pytest.raises(SchemaMissing, match="airflow-pgchange install"), ConsumerTransaction(FEED, bare_db):
        pass


def test_another_version_of_the_schemas_says_what_to_run(db, connect):
    connect().execute("insert into pubsub.installed (version) values (99)")
    with pytest.raises(SchemaVersionMismatch, match="upgrade"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)


def test_a_role_without_rights_is_told_which_function_grants_them(db, role):
    with (
        pytest.raises(PermissionDenied, match="grant_consumer"),
        ConsumerTransaction(FEED, role("nobody").conninfo),
    ):
        pass


def test_a_dead_server_is_named():
    with (
        pytest.raises(ServerUnavailable),
        ConsumerTransaction(FEED, "host=127.0.0.1 port=1 dbname=x user=x connect_timeout=2"),
    ):
        pass


def test_a_consumer_needs_the_rights_that_grant_consumer_gives_and_no_more(db, connect, role):
    connection = connect()
    expected = commits(connection, 5)
    consumer = role("consumer")
    connection.execute("select pubsub.grant_consumer(%s::regrole)", [consumer.name])
    assert drain(consumer.conninfo, limit=2) == expected
    with (
        pytest.raises(Exception, match="permission denied"),
        ConsumerTransaction(FEED, consumer.conninfo) as c,
    ):
        c.connection.execute("update pubsub.watermark set version = 0")


def test_trimmed_history_is_told_to_a_new_consumer_who_must_accept_it(db, connect):
    connection = connect()
    connection.execute("insert into revision.trimmed (branch_id, upto, commits) values (0, '100', 12)")
    commits(connection)
    with pytest.raises(HistoryTrimmed, match="12 commits"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
    assert len(drain(db, feed=CommitFeed("brave", 0, accept_trimmed=True))) == 1


def test_the_position_of_a_consumer_is_plain_json(db, connect):
    connection = connect()
    commits(connection, 3)
    drain(db, limit=2)
    found = position(connection, FEED)
    assert found["version"] == 2
    assert found["partial"] is None


def test_a_published_queue_is_claimed_retried_and_trimmed(db, connect):
    connection = connect()
    connection.execute("create publication everything for all tables")
    ids = commits(connection, 3)
    claim_and_fail(db, 2)
    assert drain(db, limit=2) == ids
    connection.execute("select revision.maintain_partitions()")
    narrow_partitions(connection)
    use_up_transactions(connection, 200)
    drain(db)
    connection.execute("select pubsub.trim_commit_queue('0')")
