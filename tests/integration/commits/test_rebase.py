"""A rebase after a restore, of a queue with the transaction ids of another cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg import errors

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from tests.commits import commits, drain
from tests.tubes import one
from tests.waiting import until, waits

ELSEWHERE = 1_000_000
"""A transaction id that this cluster has not reached. The queue comes from a cluster that had used more ids."""


def test_commits_after_a_rebase_come_last_though_the_queue_needs_more_transaction_ids_than_the_cluster_had(
    own_database, connect_to
):
    """Takes seconds: a new cluster is started, as the queue must need more ids than its cluster has used."""
    connection = connect_to(own_database)
    ((runs,),) = connection.execute("select pg_current_xact_id()::text::bigint + 100")
    queue = {"elsewhere": ELSEWHERE, "runs": runs}
    connection.execute(
        "insert into revision.commit_queue (commit_id, branch_id, txid) "
        "select %(elsewhere)s + n, 0, (%(elsewhere)s + n)::text::xid8 from generate_series(1, %(runs)s) as n",
        queue,
    )
    connection.execute("select pubsub.register('test', 0)")
    # Process every second commit, because the rebase makes one transaction of neighbouring commits.
    connection.execute(
        "update pubsub.watermark set snapshot = (select format('%%s:%%s:%%s', %(elsewhere)s, "
        "%(elsewhere)s + %(runs)s + 1, string_agg((%(elsewhere)s + n)::text, ',' order by n))::pg_snapshot "
        "from generate_series(1, %(runs)s, 2) as n)",
        queue,
    )
    connection.execute("update revision.origin set written_in = '3'")
    connection.execute("select pubsub.rebase_after_restore()")
    new = commits(connection)
    assert drain(own_database) == [*(ELSEWHERE + n for n in range(1, runs + 1, 2)), *new]


def test_each_consumer_goes_on_where_it_was_after_a_rebase(db, connection):
    feeds = [CommitFeed("behind", 0), CommitFeed("ahead", 0), CommitFeed("between", 0)]
    for feed in feeds:
        connection.execute("select pubsub.register(%s, 0)", [feed.consumer])
    expected = commits(connection, 3)
    for feed, count in zip(feeds, (0, 3, 2), strict=True):
        for _ in range(count):
            with ConsumerTransaction(feed, db) as consumer:
                consumer.claim(1)
                consumer.ack()
    connection.execute("update revision.origin set written_in = '3'")
    connection.execute("select pubsub.rebase_after_restore()")
    left = [drain(db, feed=feed) for feed in feeds]
    assert left == [expected, [], expected[2:]]


def test_a_rebase_waits_for_commits_that_are_being_written(db, connection, connect):
    connection.execute("select pubsub.register('test', 0)")
    writer = connect(autocommit=False)
    expected = commits(writer)
    connection.execute("update revision.origin set written_in = '3'")
    with ThreadPoolExecutor(1) as threads:
        rebase = threads.submit(connection.execute, "select pubsub.rebase_after_restore()")
        until(connect(), waits(connection))
        writer.commit()
        rebase.result()
    assert drain(db) == expected


@pytest.mark.parametrize(
    "recipe",
    [
        "update pubsub.watermark set txid = 0",
        "update pubsub.watermark set txid = '0'",
        "update revision.commit_queue set txid = '0'",
    ],
)
def test_transaction_ids_that_are_set_by_hand_after_a_restore_are_refused_with_the_call_that_does_it(
    connection, recipe
):
    commits(connection)
    with pytest.raises(errors.Error, match="txid of .* cannot be set") as caught:
        connection.execute(recipe)
    assert (caught.value.sqlstate, "pubsub.rebase_after_restore()" in str(caught.value)) == ("PC008", True)


def test_a_watermarks_txid_follows_its_snapshot(connection):
    connection.execute("select pubsub.register('test', 0)")
    assert connection.execute("select txid from pubsub.watermark").fetchone() == (0,)
    connection.execute("update pubsub.watermark set snapshot = '7:9:7'")
    assert connection.execute("select txid from pubsub.watermark").fetchone() == (7,)


def test_a_move_out_of_the_default_partition_that_a_dump_cut_off_is_over_after_a_rebase(connection):
    """Its bounds are transaction ids of the old cluster, in which the new partitions may lie."""
    connection.execute(
        "alter table revision.commit_queue_default add constraint pgchange_moving_5_1000000 check (true) not valid"
    )
    connection.execute("update revision.origin set written_in = '3'")
    connection.execute("select pubsub.rebase_after_restore()")
    assert one(connection, "select lower is null from revision.moving()")
