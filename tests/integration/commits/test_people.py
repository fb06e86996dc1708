"""The tools of a person: status, skip, move, drop, trim."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_pgchange.admin import consumers, manual_operations
from airflow_pgchange.errors import BatchNotFinished, UnknownConsumer
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from tests.commits import (
    FEED,
    claim_and_fail,
    commits,
    drain,
    narrow_partitions,
    queued,
    use_up_transactions,
)
from tests.limits import be_patient
from tests.waiting import until, waits

IN_ORDER = CommitFeed("test", 0, in_order=True)


def test_status_shows_the_batch_in_work_and_its_attempts(db, connect):
    connection = connect()
    commits(connection, 3)
    claim_and_fail(db)
    claim_and_fail(db)
    (shown,) = consumers.status(connection)
    assert (shown["ready"], shown["attempt"], shown["at_work"]) == (3, 2, False)
    with ConsumerTransaction(FEED, db):
        assert consumers.status(connection)[0]["at_work"]


def test_status_names_what_holds_an_in_order_consumer_back(own_database, connect_to):
    db = own_database
    slow, fast = connect_to(db, autocommit=False), connect_to(db)
    drain(db, feed=IN_ORDER)
    slow.execute("set application_name to 'nightly export'")
    commits(slow)
    commits(fast)
    (shown,) = consumers.status(fast)
    assert shown["waiting"] == 1
    pid = slow.info.backend_pid
    assert f"process {pid} (nightly export, " in shown["held_back_by"]
    assert shown["held_back_by"].endswith(f"; to end it: select pg_terminate_backend({pid})")


def test_a_consumer_that_does_not_read_in_order_waits_for_nobody(own_database, connect_to):
    slow, fast = connect_to(own_database, autocommit=False), connect_to(own_database)
    drain(own_database)
    commits(slow)
    commits(fast)
    (shown,) = consumers.status(fast)
    assert (shown["ready"], shown["waiting"], shown["held_back_by"]) == (1, 0, None)


def test_status_names_a_prepared_transaction(own_database, connect_to):
    connection = connect_to(own_database)
    drain(own_database, feed=IN_ORDER)
    connection.execute("begin")
    commits(connection)
    connection.execute("prepare transaction 'forgotten'")
    commits(connection)
    assert consumers.status(connection)[0]["held_back_by"].endswith(
        "; to end it there: rollback prepared 'forgotten'"
    )
    connection.execute("rollback prepared 'forgotten'")


def test_a_poisonous_batch_is_skipped_and_recorded(db, connect):
    connection = connect()
    poison = commits(connection, 2)
    claim_and_fail(db)
    rest = commits(connection, 2)
    skipped = manual_operations.skip_batch(connection, connection, FEED, "cannot be parsed")
    row = connection.execute(
        "select batch_id::text, reason, changes from pgchange.letter where consumer = 'commits:test/0'"
    ).fetchone()
    assert row == (skipped, "cannot be parsed", len(poison))
    assert drain(db) == rest


def test_nothing_in_work_cannot_be_skipped(db, connect):
    drain(db)
    with pytest.raises(BatchNotFinished, match="no batch in work"):
        manual_operations.skip_batch(connect(), connect(), FEED, "why not")


def test_moved_to_a_time_what_was_written_since_comes(db, connect):
    connection = connect()
    commits(connection, 3)
    at = connection.execute("select clock_timestamp()").fetchone()[0]
    since = commits(connection, 2)
    drain(db)
    manual_operations.move_consumer(connection, connection, FEED, at)
    assert drain(db) == since


def test_an_unknown_consumer_is_named(connect):
    connection = connect()
    with pytest.raises(UnknownConsumer, match="commits:nobody/0"):
        manual_operations.drop_consumer(connection, connection, CommitFeed("nobody", 0))


def test_trimming_empties_partitions_that_everybody_has_processed(own_database, connect_to):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    commits(connection)
    drain(own_database)
    use_up_transactions(connection)
    assert any("trimmed 1 commits" in line for line in manual_operations.trim_commit_queue(connection, "0 s"))
    assert connection.execute("select count(*) from revision.commit_queue").fetchone() == (0,)


def test_trimming_keeps_what_a_consumer_has_not_processed(own_database, connect_to):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    connection.execute("select pubsub.lock_watermark('test', 0)")
    expected = commits(connection)
    use_up_transactions(connection)
    assert any(
        "commits:test/0 has not processed it" in line
        for line in manual_operations.trim_commit_queue(connection, "0 s")
    )
    assert drain(own_database) == expected


def test_trimming_keeps_what_is_young(own_database, connect_to):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    commits(connection)
    use_up_transactions(connection)
    assert manual_operations.trim_commit_queue(connection, "1 hour") == []


def test_trimming_keeps_young_commits_of_a_consumer_that_ends_while_it_is_asked_about(
    own_database, connect_to
):
    connection, ending = connect_to(own_database), connect_to(own_database, autocommit=False)
    narrow_partitions(connection)
    connection.execute("select pubsub.lock_watermark('test', 0)")
    commits(connection)
    connection.execute("update revision.commit_queue set created_at = now() - interval '1 day'")
    commits(connection)
    use_up_transactions(connection)
    ending.execute("lock table pubsub.watermark in access exclusive mode")
    with ThreadPoolExecutor() as threads:
        trimmed = threads.submit(manual_operations.trim_commit_queue, connect_to(own_database), "1 hour")
        until(connection, waits(behind=ending))
        ending.execute("update pubsub.watermark set snapshot = pg_current_snapshot()")
        ending.commit()
        (told,) = trimmed.result()
    assert told.endswith("it came into use")
    assert len(queued(connection)) == 2


def test_trimming_keeps_what_a_claim_of_a_consumer_elsewhere_needs(own_database, connect_to, db):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    expected = commits(connection, 3)
    with pytest.raises(BatchNotFinished), ConsumerTransaction(FEED, db, own_database) as consumer:
        consumer.claim(2)
    use_up_transactions(connection)
    assert any(
        "commits:test/0 has not processed it" in line
        for line in manual_operations.trim_commit_queue(connection, "0 s")
    )
    with ConsumerTransaction(FEED, db, own_database) as consumer:
        consumer.claim(2)
        assert [change.id for change in consumer.changes()] == expected[:2]
        consumer.ack()


def test_trimming_keeps_what_a_consumer_elsewhere_was_moved_back_to(own_database, connect_to, db):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    expected = commits(connection, 3)
    assert drain(db, own_database) == expected
    manual_operations.move_consumer(connect_to(db), connection, FEED, "beginning")
    use_up_transactions(connection)
    assert any(
        "commits:test/0 has not processed it" in line
        for line in manual_operations.trim_commit_queue(connection, "0 s")
    )
    assert drain(db, own_database) == expected


def test_maintenance_that_would_have_to_wait_for_a_writer_is_postponed(own_database, connect_to):
    connection, writer = connect_to(own_database), connect_to(own_database, autocommit=False)
    drop_partitions(connection)
    commits(writer)
    connection.execute("set statement_timeout = '20s'")
    lines = connection.execute("select revision.maintain_partitions(100, 1)").fetchall()
    assert "postponed" in lines[0][0]
    writer.commit()


def test_a_partition_into_which_a_dump_is_loaded_while_maintenance_waits_is_not_dropped(
    own_database, connect_to
):
    connection, loading = connect_to(own_database), connect_to(own_database, autocommit=False)
    narrow_partitions(connection)
    use_up_transactions(connection)
    be_patient(connection)
    loading.execute(
        "insert into revision.commit_queue (commit_id, branch_id, txid) "
        "select 1, 0, lower::text::xid8 from revision.partitions() order by lower limit 1"
    )
    with ThreadPoolExecutor() as threads:
        dropped = threads.submit(connect_to(own_database).execute, "select revision.drop_empty_partitions(0)")
        until(connection, waits(behind=loading))
        loading.commit()
        dropped.result()
    assert queued(connection) == [(1, 0)]


def drop_partitions(connection):
    for (partition,) in connection.execute("select relid from revision.partitions()").fetchall():
        connection.execute(f"drop table {partition}")


def test_a_look_for_old_history_ends_at_the_first_partition_that_is_too_young(own_database, connect_to):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    for _ in range(3):
        commits(connection)
        use_up_transactions(connection)
    drain(own_database)
    connection.execute("update revision.commit_queue set created_at = now() - interval '1 year' where id = 2")
    assert manual_operations.trim_commit_queue(connection, "30 days") == []
    connection.execute("update revision.commit_queue set created_at = now() - interval '1 year' where id = 1")
    assert len(manual_operations.trim_commit_queue(connection, "30 days")) == 2


def test_a_consumer_of_a_branch_that_is_gone_is_shown_beside_the_others(db, connect):
    connection = connect()
    drain(db)
    connection.execute("insert into pubsub.watermark (consumer_id, branch_id) values ('slip', 99)")
    shown = {one["consumer"]: one for one in consumers.status(connection, connection)}
    assert shown["commits:test/0"]["ready"] == 0
    assert "no branch 99" in shown["commits:slip/99"]["held_back_by"]
