"""Write commits, process them, and let consumers fail on them, for the tests of feeds."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from airflow_pgchange.feeds import Batch, CommitFeed, ConsumerTransaction
from tests.batches import drained

FEED = CommitFeed("test", 0)


class Failed(Exception):
    """Raised by a consumer after its claim."""


def commits(connection: psycopg.Connection[Any], n: int = 1) -> list[int]:
    """Write ``n`` commits of the trunk by one statement, and return their ids."""
    query = "insert into revision.commit select from generate_series(1, %s) returning id"
    return [row[0] for row in connection.execute(query, [n]).fetchall()]


def queued(connection: psycopg.Connection[Any]) -> list[tuple[int, int]]:
    """Return the commits of the queue with their branches, in the order of the queue."""
    rows = connection.execute("select commit_id, branch_id from revision.commit_queue order by id").fetchall()
    return [tuple(row) for row in rows]


def drain(results: str, source: str | None = None, feed: CommitFeed = FEED, limit: int = 1000) -> list[int]:
    """Process everything that is ready, and return the commits in the order in which they came."""
    return [change.id for change in drained(feed, results, source, limit)]


def claim_and_fail(
    results: str, source: str | None = None, feed: CommitFeed = FEED, limit: int = 1000
) -> Batch:
    """Claim a batch, and never ack it."""
    with pytest.raises(Failed), ConsumerTransaction(feed, results, source) as consumer:
        batch = consumer.claim(limit)
        raise Failed
    assert batch is not None
    return batch


def narrow_partitions(connection: psycopg.Connection[Any], width: int = 50) -> None:
    """Make partitions of the queue that are so small that a test can fill them. The first begins about now."""
    for (partition,) in connection.execute("select relid from revision.partitions()").fetchall():
        connection.execute(f"drop table {partition}")
    while connection.execute("select pg_current_xact_id()::text::bigint %% %s", [width]).fetchone() != (0,):
        pass
    # Delete the recorded rate of transactions: other tests used transaction ids, too.
    connection.execute("delete from revision.pace")
    connection.execute("select revision.maintain_partitions(%s, 2)", [width])


def use_up_transactions(connection: psycopg.Connection[Any], n: int = 60) -> None:
    """Advance the cluster by ``n`` transactions."""
    connection.execute(
        f"do $$ begin for n in 1..{n} loop perform pg_current_xact_id(); commit; end loop; end $$"
    )
