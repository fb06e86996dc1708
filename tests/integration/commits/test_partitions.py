"""Partitions of the queue: created ahead, trimmed and dropped, without delays for others."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import maintain, manual_operations
from airflow_pgchange.errors import HistoryTrimmed
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from tests.commits import FEED, commits, drain, narrow_partitions, use_up_transactions
from tests.findings import findings
from tests.limits import be_patient
from tests.waiting import until, waits


@pytest.fixture
def queue(db, connect_to):
    """A queue of narrow partitions, in a cluster in which no other session holds back xmin."""
    connection = connect_to(db)
    narrow_partitions(connection)
    return connection


def test_history_without_an_age_from_which_it_may_go_stays(queue):
    commits(queue, 3)
    use_up_transactions(queue)
    for keep in (None, "-1 s"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="how much history stays is retention"):
            queue.execute("select pubsub.trim_commit_queue(%s)", [keep])
    assert queue.execute("select count(*) from revision.commit_queue").fetchone() == (3,)


def test_a_new_consumer_gets_an_error_about_trimmed_commits(queue, db):
    commits(queue, 3)
    drain(db)
    use_up_transactions(queue)
    manual_operations.trim_commit_queue(queue, "0 s")
    late = CommitFeed("late", 0)
    with (
        pytest.raises(HistoryTrimmed, match="3 commits"),
        ConsumerTransaction(late, db) as consumer,
    ):
        consumer.claim(1)
    with pytest.raises(Exception, match="3 commits"):
        queue.execute("select pubsub.lock_watermark('by hand', 0)")
    queue.execute("select pubsub.lock_watermark('by hand', 0, accept_trimmed => true)")


EARLIER = "update pubsub.watermark set (version, snapshot) = (%s, %s)"


@pytest.mark.parametrize("how", ["restored", "moved"])
def test_a_consumer_at_an_earlier_time_gets_an_error_about_trimmed_commits(queue, db, how):
    (point,) = queue.execute("select pubsub.point(0)").fetchone()
    commits(queue, 1)
    drain(db)
    earlier = queue.execute("select version, snapshot::text from pubsub.watermark").fetchone()
    commits(queue, 3)
    drain(db)
    commits(queue, 1)
    drain(db)
    use_up_transactions(queue)
    manual_operations.trim_commit_queue(queue, "0 s")
    if how == "restored":
        queue.execute(EARLIER, earlier)
    else:
        queue.execute("select pubsub.move_consumer(%s, 0, %s)", [FEED.consumer, Jsonb(point)])
    with pytest.raises(HistoryTrimmed, match="5 commits"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
    manual_operations.move_consumer(queue, queue, FEED, "beginning")
    commits(queue, 1)
    assert len(drain(db)) == 1
    assert drain(db) == []


def test_nothing_is_trimmed_above_the_oldest_open_transaction(queue, db, connect_to):
    slow = connect_to(db, autocommit=False)
    slow.execute("select pg_current_xact_id()")
    commits(queue)
    drain(db)
    use_up_transactions(queue)
    assert manual_operations.trim_commit_queue(queue, "0 s") == []
    late = commits(slow)
    slow.commit()
    assert drain(db) == late
    assert any("trimmed 2 commits" in line for line in manual_operations.trim_commit_queue(queue, "0 s"))


def test_a_consumer_that_comes_while_a_trim_waits_gets_everything(queue, db, connect_to):
    expected = commits(queue, 3)
    drain(db)
    use_up_transactions(queue)
    partition = oldest_partition(queue)
    be_patient(queue)
    reader = connect_to(db, autocommit=False)
    reader.execute(f"select from revision.{partition}")
    lines = []

    def trim():
        lines.extend(manual_operations.trim_commit_queue(connect_to(db), "0 s"))

    trimming = threading.Thread(target=trim)
    trimming.start()
    until(queue, waits(behind=reader))
    queue.execute("select pubsub.lock_watermark('new', 0)")
    reader.rollback()
    trimming.join()
    assert lines == [f"kept {partition}: it came into use"]
    assert drain(db, feed=CommitFeed("new", 0)) == expected


def test_a_trim_does_not_wait_long_for_a_reader(queue, db, connect_to):
    commits(queue)
    drain(db)
    use_up_transactions(queue)
    partition = oldest_partition(queue)
    reader = connect_to(db, autocommit=False)
    reader.execute(f"select from revision.{partition}")
    queue.execute("set statement_timeout = '20s'")
    assert manual_operations.trim_commit_queue(queue, "0 s") == [f"postponed {partition}: it is in use"]


def test_a_consumer_at_work_does_not_hold_a_trim_up(queue, db):
    commits(queue)
    drain(db)
    use_up_transactions(queue)
    commits(queue)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        list(consumer.changes())
        assert any("trimmed 1 commits" in line for line in manual_operations.trim_commit_queue(queue, "0 s"))
        consumer.ack()


def test_a_trim_does_not_wait_for_writers_and_they_not_for_a_trim(queue, db, connect_to):
    commits(queue)
    drain(db)
    use_up_transactions(queue, 110)
    queue.execute("select revision.maintain_partitions(50, 2)")
    writer, trimming = (connect_to(db, autocommit=False) for _ in range(2))
    expected = commits(writer)
    trimming.execute("set local lock_timeout = '1s'")
    (line,) = trimming.execute("select pubsub.trim_commit_queue('0 s')").fetchone()
    assert "trimmed 1 commits" in line
    writer.execute("set local lock_timeout = '1s'")
    expected += commits(writer)
    writer.commit()
    trimming.commit()
    assert drain(db) == expected


SLOW = """
alter function pubsub.trim_partition(regclass, interval) rename to trim_quickly;
create function pubsub.trim_partition(partition regclass, keep interval) returns text language sql as $$
    select pubsub.trim_quickly(partition, keep) from pg_sleep(0.5)
$$;
"""


def test_partitions_that_take_long_are_trimmed_in_a_transaction_each(queue, db):
    for _ in range(3):
        commits(queue)
        drain(db)
        use_up_transactions(queue)
        queue.execute("select revision.maintain_partitions(50, 2)")
    queue.execute(SLOW)
    first = queue.execute("select pubsub.trim_commit_queue('0 s')").fetchall()
    assert [line.split()[0] for (line,) in first] == ["trimmed", "left"]
    assert [line.split()[0] for line in manual_operations.trim_commit_queue(queue, "0 s")] == [
        "trimmed",
        "trimmed",
    ]


def test_a_writer_does_not_wait_for_maintenance_under_way(queue, db, connect_to):
    writer, maintaining = connect_to(db), connect_to(db, autocommit=False)
    lines = maintaining.execute("select revision.maintain_partitions(50, 20)").fetchall()
    assert any("added" in line for (line,) in lines)
    writer.execute("set lock_timeout = '1s'")
    expected = commits(writer, 2)
    maintaining.commit()
    assert drain(db) == expected


def test_rows_without_a_partition_stay_where_a_consumer_reads_them_and_are_trimmed(queue, db):
    for (partition,) in queue.execute("select relid from revision.partitions()").fetchall():
        queue.execute(f"drop table {partition}")
    expected = [*commits(queue, 3), *commits(queue, 2)]
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(4)
        (told,) = queue.execute("select revision.maintain_partitions(50, 1)").fetchone()
        assert "added" in told
        assert in_default(queue) == 5
        assert [change.id for change in consumer.changes()] == expected[:4]
        consumer.ack()
    expected += commits(queue, 2)
    assert in_default(queue) == 5
    assert manual_operations.trim_commit_queue(queue, "1 hour") == []
    (told,) = manual_operations.trim_commit_queue(queue, "0 s")
    assert "commits:test/0 has not processed it" in told
    assert drain(db) == expected[4:]
    assert any("trimmed 5 commits" in line for line in manual_operations.trim_commit_queue(queue, "0 s"))
    assert in_default(queue) == 0


def test_a_few_rows_without_a_partition_move_to_one_under_a_batch_of_them(queue, db):
    for (partition,) in queue.execute("select relid from revision.partitions()").fetchall():
        queue.execute(f"drop table {partition}")
    expected = [*commits(queue, 3), *commits(queue, 2)]
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(4)
        steps = [queue.execute("select revision.maintain_partitions(50, 1)").fetchone()[0] for _ in range(3)]
        assert [step.split()[0] for step in steps] == ["added", "left", "moved"]
        assert in_default(queue) == 0
        assert [change.id for change in consumer.changes()] == expected[:4]
        consumer.ack()
    assert drain(db) == expected[4:]
    assert queue.execute("select revision.maintain_partitions(50, 1)").fetchone() is None


def test_the_default_partition_is_not_trimmed_while_an_open_transaction_may_write_there(
    queue, db, connect_to
):
    slow = connect_to(db, autocommit=False)
    for (partition,) in queue.execute("select relid from revision.partitions()").fetchall():
        queue.execute(f"drop table {partition}")
    slow.execute("select pg_current_xact_id()")
    commits(queue)
    queue.execute("select revision.maintain_partitions(50, 1)")
    drain(db)
    assert manual_operations.trim_commit_queue(queue, "0 s") == []
    late = commits(slow)
    slow.commit()
    assert drain(db) == late
    assert any("trimmed 2 commits" in line for line in manual_operations.trim_commit_queue(queue, "0 s"))


def test_a_partition_of_ids_that_the_default_one_holds_is_refused(queue):
    for (partition,) in queue.execute("select relid from revision.partitions()").fetchall():
        queue.execute(f"drop table {partition}")
    commits(queue)
    with pytest.raises(psycopg.errors.ObjectInUse, match="has commits"):
        queue.execute("select revision.add_partition(0, 1000000000)")
    assert in_default(queue) == 1


def test_a_trim_does_not_read_all_that_a_consumer_has_not_processed(queue, db, connect_to):
    connection = connect_to(db, autocommit=False)
    drain(db)
    commits(queue, 1000)
    use_up_transactions(queue)
    partition = oldest_partition(queue)
    (told,) = connection.execute("select pubsub.trim_commit_queue('0 s')").fetchone()
    assert told == f"kept {partition}: commits:test/0 has not processed it"
    query = f"select pg_stat_get_xact_tuples_returned('revision.{partition}'::regclass)"
    assert connection.execute(query).fetchone()[0] < 100


def test_the_default_partition_is_read_once_for_all_partitions_that_are_made(queue):
    for (partition,) in queue.execute("select relid from revision.partitions()").fetchall():
        queue.execute(f"drop table {partition}")
    commits(queue, 3)
    told = []
    queue.add_notice_handler(lambda notice: told.append(notice.message_primary))
    queue.execute("set client_min_messages = debug1")
    assert len(queue.execute("select revision.maintain_partitions(50, 3)").fetchall()) > 2
    assert told.count('verifying table "commit_queue_default"') == 1


MANY = 45_000
"""More rows than maintenance reads while writers wait. The pages have a fill factor of 10 %, so the table is large."""


def without_partitions(queue, rows):
    """Drop all partitions and write this number of rows, as if no maintenance had run for a long time."""
    queue.execute("alter table revision.commit_queue_default set (fillfactor = 10)")
    for (partition,) in queue.execute("select relid from revision.partitions()").fetchall():
        queue.execute(f"drop table {partition}")
    queue.execute(
        "insert into revision.commit_queue (commit_id, branch_id) select g, g %% 3 from generate_series(1, %s) as g",
        [rows],
    )


def test_a_default_partition_that_has_grown_is_emptied_while_writers_write(queue, db, connect_to):
    without_partitions(queue, MANY)
    assert "new rows go to the default partition" in findings(queue, "revision")[0]
    (line,) = queue.execute("select revision.maintain_partitions(50, 2)").fetchone()
    assert line.startswith("left")
    expected = commits(connect_to(db))
    lines = maintain(queue, width=50, ahead=2).done
    assert any(f"moved {MANY} commits" in line for line in lines)
    assert any("added partition" in line for line in lines)
    assert not any(line.startswith(("left", "postponed partitions")) for line in lines)
    assert in_default(queue) <= 1
    expected += commits(queue)
    assert in_default(queue) <= 1
    assert findings(queue, "revision") == []
    written = "select count(*), count(*) filter (where commit_id = any (%s)) from revision.commit_queue"
    assert queue.execute(written, [expected]).fetchone() == (MANY + 2, 4)


def test_rows_of_a_default_partition_that_may_still_be_written_do_not_move(queue, db, connect_to):
    slow = connect_to(db, autocommit=False)
    slow.execute("select pg_current_xact_id()")
    without_partitions(queue, MANY)
    (line,) = queue.execute("select revision.maintain_partitions(50, 2)").fetchone()
    assert line.startswith("postponed partitions: all rows that can move have left")
    late = commits(slow)
    slow.commit()
    steps = [queue.execute("select revision.maintain_partitions(50, 2)").fetchone()[0] for _ in range(2)]
    assert [step.split()[0] for step in steps] == ["left", "moved"]
    assert late


def paced(queue, seconds, per_second):
    """Pretend that the last maintenance ran this number of seconds ago, and that the cluster used this number of ids a
    second since."""
    queue.execute(
        "update revision.pace set at = clock_timestamp() - %s * interval '1 second', "
        "txid = pg_snapshot_xmax(pg_current_snapshot())::text::bigint - %s",
        [seconds, seconds * per_second],
    )


def test_partitions_are_ready_for_ten_times_the_transactions_between_two_runs(queue):
    (first,) = queue.execute("select max(upper) from revision.partitions()").fetchone()
    use_up_transactions(queue, 500)
    paced(queue, 100, 5)
    assert "new rows go to the default partition" in findings(queue, "revision")[0]
    lines = queue.execute("select revision.maintain_partitions(50, 2)").fetchall()
    assert len(lines) <= 2 + 16 + 1
    (last,) = queue.execute("select max(upper) from revision.partitions()").fetchone()
    assert 500 + 5000 - 100 < last - first < 500 + 5000 + 1000
    assert findings(queue, "revision") == []


def test_partitions_that_last_for_less_than_three_runs_are_a_finding(queue):
    use_up_transactions(queue, 50)
    paced(queue, 60, 1)
    queue.execute("update revision.pace set seconds = 60")
    (told,) = findings(queue, "revision")
    assert re.search(r"last for 00:0[01]:\d\d at 1 transactions a second", told)
    queue.execute("select revision.maintain_partitions(50, 20)")
    assert findings(queue, "revision") == []


@pytest.mark.parametrize(
    "query", ["select revision.end_of_default(0)", "select pubsub.default_at_rest(9000000000)"]
)
def test_where_the_default_partition_ends_is_known_without_reading_it(queue, db, connect_to, query):
    without_partitions(queue, 1000)
    queue.execute("select revision.maintain_partitions(5000000000, 2)")
    looking = connect_to(db, autocommit=False)
    assert looking.execute(query).fetchone()[0]
    seen = (
        "select sum(pg_stat_get_xact_tuples_returned(c) + pg_stat_get_xact_tuples_fetched(c)) "
        "from unnest(array['', '_branch_id_txid_id_idx']) as t(n) "
        "cross join lateral cast(('revision.commit_queue_default' || t.n)::regclass as oid) as c"
    )
    assert looking.execute(seen).fetchone()[0] < 100


def test_the_default_partition_ends_behind_a_transaction_that_wrote_while_it_was_asked_for(
    queue, db, connect_to
):
    without_partitions(queue, 10)
    asking, end = connect_to(db), None
    deadline = time.monotonic() + 60
    # The call waits for writers only for a limited time, so repeat it.
    while end is None:
        assert time.monotonic() < deadline
        writer = connect_to(db, autocommit=False)
        writer.execute("lock table revision.commit_queue in row exclusive mode")
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(asking.execute, "select revision.end_of_default(0)")
            until(queue, waits(behind=writer))
            commits(writer)
            (txid,) = writer.execute("select pg_current_xact_id()::text::bigint").fetchone()
            writer.commit()
            with suppress(psycopg.errors.LockNotAvailable):
                (end,) = told.result(60).fetchone()
    assert end > txid


@pytest.mark.parametrize(
    "step",
    [
        "revision.maintain_partitions(50, 40)",
        "revision.drop_empty_partitions(0)",
        "pubsub.trim_commit_queue('0 s')",
    ],
)
def test_a_second_maintenance_steps_aside_while_another_is_at_work(queue, db, connect_to, step):
    first = connect_to(db, autocommit=False)
    commits(queue)
    drain(db)
    use_up_transactions(queue)
    assert "added" in first.execute("select revision.maintain_partitions(50, 20)").fetchone()[0]
    queue.execute("set statement_timeout = '20s'")
    (told,) = queue.execute(f"select {step}").fetchone()
    assert "another maintenance is at work" in told
    first.commit()
    assert "another" not in str(queue.execute(f"select {step}").fetchone())


def test_a_trim_that_would_not_see_who_came_meanwhile_is_refused(queue):
    queue.execute("set default_transaction_isolation = 'repeatable read'")
    with pytest.raises(psycopg.Error, match="read committed") as refused:
        queue.execute("select pubsub.trim_commit_queue('0 s')")
    assert refused.value.sqlstate == "PC007"


def test_a_writer_of_the_default_partition_outlives_that_its_row_gets_one(queue, db, connect_to):
    for (partition,) in queue.execute("select relid from revision.partitions()").fetchall():
        queue.execute(f"drop table {partition}")
    maintaining = connect_to(db, autocommit=False)
    maintaining.execute("select revision.maintain_partitions(50, 1)")
    written = []
    writing = threading.Thread(target=lambda: written.extend(commits(connect_to(db), 2)))
    writing.start()
    until(queue, waits(behind=maintaining))
    maintaining.commit()
    writing.join()
    assert len(written) == 2
    assert drain(db) == written


def test_emptied_partitions_are_dropped_when_there_are_many(queue, db):
    gone = commits(queue)
    drain(db)
    for _ in range(5):
        use_up_transactions(queue)
        queue.execute("select revision.maintain_partitions(50, 2)")
    manual_operations.trim_commit_queue(queue, "0 s")
    kept = commits(queue)
    before = partitions(queue)
    assert queue.execute("select count(*) from revision.drop_empty_partitions(8)").fetchone() == (0,)
    assert partitions(queue) == before
    dropped = queue.execute("select count(*) from revision.drop_empty_partitions(2)").fetchone()[0]
    assert dropped >= 4
    assert len(partitions(queue)) == len(before) - dropped
    assert drain(db) == kept
    later = commits(queue)
    assert drain(db) == later
    assert gone


def test_maintenance_drops_emptied_partitions(queue, db):
    lines = []
    for _ in range(11):
        use_up_transactions(queue)
        lines += queue.execute("select revision.maintain_partitions(50, 2)").fetchall()
    assert sum("dropped the empty partition" in line for (line,) in lines) > 8


def test_emptied_partitions_stay_while_somebody_writes(queue, db, connect_to):
    for _ in range(4):
        use_up_transactions(queue)
        queue.execute("select revision.maintain_partitions(50, 2)")
    before = partitions(queue)
    writer = connect_to(db, autocommit=False)
    expected = commits(writer)
    queue.execute("set statement_timeout = '20s'")
    (line,) = queue.execute("select revision.drop_empty_partitions(0)").fetchone()
    assert "postponed" in line
    assert partitions(queue) == before
    writer.commit()
    assert drain(db) == expected


def test_an_empty_partition_that_transactions_may_still_write_is_not_dropped(queue, db, connect_to):
    slow = connect_to(db, autocommit=False)
    slow.execute("select pg_current_xact_id()")
    use_up_transactions(queue)
    assert queue.execute("select count(*) from revision.drop_empty_partitions(0)").fetchone() == (0,)
    expected = commits(slow)
    slow.commit()
    assert drain(db) == expected


def in_default(connection):
    return connection.execute("select count(*) from revision.commit_queue_default").fetchone()[0]


def oldest_partition(connection):
    query = "select c.relname from revision.partitions() join pg_class as c on c.oid = relid limit 1"
    return connection.execute(query).fetchone()[0]


def partitions(connection):
    return connection.execute("select relid::text from revision.partitions()").fetchall()
