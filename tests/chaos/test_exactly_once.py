"""Nothing lost and nothing twice, whatever writers, consumers and servers do."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from tests.chaos import harness, keyed
from tests.chaos.harness import FEED, PROOF, Campaign, consume_once, drain, insert, judge, processed

OTHER_KEYS = pytest.mark.release(
    "a key of two columns is in every run, and the queue is the same for all keys"
)
OTHERS = [("uuid", True), ("text", False), ("pair", True)]


def assert_exactly_once(done, results, source, in_order=False):
    assert_sound(done, judge(results, source), in_order)


def assert_sound(done, verdict, in_order=False):
    assert done.errors == []
    assert done.failed > 0
    assert verdict.written > 0
    assert (verdict.lost, verdict.doubled) == (0, 0)
    if in_order:
        assert verdict.in_order


def test_results_beside_the_commits(new_cluster):
    """Process in order in this test: the other campaigns choose at random, and all of them may choose out of order."""
    source = new_cluster().conninfo()
    done = harness.run(CommitFeed("chaos", 0, in_order=True), source, [source], Campaign())
    assert_exactly_once(done, source, source, in_order=True)


@pytest.mark.parametrize(
    ("shape", "ordered"),
    [("pair", False), *(pytest.param(*other, marks=OTHER_KEYS) for other in OTHERS)],
)
def test_rows_with_keys_that_are_no_numbers_come_once_with_those_from_before(new_cluster, shape, ordered):
    """Takes seconds: rows from before are enqueued while writers write and consumers fail."""
    source = new_cluster().conninfo()
    done = keyed.campaign_of(shape, source, ordered)
    verdict = keyed.verdict_of(shape, source)
    assert verdict.written > keyed.BEFORE
    assert_sound(done, verdict, ordered)


def test_results_in_another_cluster(new_cluster, in_order):
    """Takes seconds: commits go on while consumers and both servers are killed."""
    source, results = new_cluster().conninfo(), new_cluster().conninfo()
    done = harness.run(CommitFeed("chaos", 0, in_order=in_order), results, [source], Campaign())
    assert_exactly_once(done, results, source, in_order)


def test_a_lagging_standby_alternating_with_its_primary(new_cluster, standby_of, in_order):
    """Takes seconds: a standby has to lag, more than once."""
    primary = new_cluster()
    standby = standby_of(primary, recovery_min_apply_delay="'120ms'")
    source = primary.conninfo()
    with psycopg.connect(source) as slow:
        slow.execute("insert into revision.commit default values")
        finish = threading.Timer(2, slow.commit)
        finish.start()
        sources = [source, f"{standby.conninfo()} target_session_attrs=any"]
        hosts = f"host=127.0.0.1,127.0.0.1 port={standby.port},{primary.port} dbname=postgres user=postgres"
        done = harness.run(
            CommitFeed("chaos", 0, in_order=in_order), source, [sources[0], hosts], Campaign(writers=8)
        )
        finish.join()
    while consume_once(CommitFeed("chaos", 0, in_order=in_order), source, source, 1000):
        pass
    assert_exactly_once(done, source, source, in_order)


@PROOF
def test_the_harness_catches_a_cursor_over_ids(new_cluster):
    source = new_cluster().conninfo()

    def read(connection, state):
        rows = connection.execute(
            "select id, commit_id from revision.commit_queue where id > %s order by id limit 1000",
            [state or 0],
        ).fetchall()
        return [row[1] for row in rows], rows[-1][0] if rows else state

    run_naive(source, [source], read)
    assert judge(source, source).lost > 0


@PROOF
def test_the_harness_catches_a_stored_raw_snapshot(new_cluster, standby_of):
    primary = new_cluster()
    standby = standby_of(primary)
    source = primary.conninfo()

    def read(connection, state):
        row = connection.execute(
            "select pg_current_snapshot()::text, array(select commit_id from revision.commit_queue "
            "where not pg_visible_in_snapshot(txid, %s::pg_snapshot) "
            "and pg_visible_in_snapshot(txid, pg_current_snapshot()))",
            [state or "1:1:"],
        ).fetchone()
        return row[1], row[0]

    run_naive(source, [source, standby.conninfo()], read)
    assert judge(source, source).lost > 0


def run_naive(source, servers, read):
    """Run a naive consumer beside the same writers. At the end, drain the feed as our consumers do."""
    harness.prepare_results(source)
    campaign = Campaign(writers=8)
    deadline = time.monotonic() + campaign.seconds
    writing = [
        threading.Thread(target=harness.write, args=(source, campaign, n, deadline))
        for n in range(campaign.writers)
    ]
    for thread in writing:
        thread.start()
    state, turn = None, 0
    with psycopg.connect(source, autocommit=True) as results:
        readers = [psycopg.connect(server, autocommit=True) for server in servers]
        finished = False
        while True:
            ids, state = read(readers[turn % len(readers)], state)
            results.execute("insert into processed (commit_id) select unnest(%s::bigint[])", [ids])
            if finished and not ids:
                break
            finished = not any(thread.is_alive() for thread in writing)
            turn += 1
        for reader in readers:
            reader.close()


def test_a_consumer_killed_between_claim_and_ack_leaves_nothing_half_done(new_cluster):
    source = new_cluster()
    harness.prepare_results(source.conninfo())
    expected = insert(source.conninfo(), 5)
    with (
        pytest.raises(Exception, match="terminat|closed|lost|consum"),
        ConsumerTransaction(FEED, source.conninfo()) as tx,
    ):
        tx.claim(10)
        with psycopg.connect(source.conninfo(), autocommit=True) as connection:
            ended = connection.execute(
                "select pg_terminate_backend(%s)", [tx.connection.info.backend_pid]
            ).fetchone()
        assert ended == (True,)
        tx.ack()
    drain(source.conninfo(), source.conninfo())
    assert processed(source.conninfo()) == expected
